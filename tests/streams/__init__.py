"""Request streams of many kinds, made up: is `hazard` ever much worse than LRU on one of them?"""
