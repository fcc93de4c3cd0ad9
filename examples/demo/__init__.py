"""The parts of `examples/demo.py`: the model, the engine runs, the chart."""
