"""Long runs of real engines under everything that goes wrong: `make soak MINUTES=30`."""
