"""What a size of the cache would bring: a trace, a model's bytes, drives, prices, and a setting."""
