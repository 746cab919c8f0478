"""The recipe: what it may say, where each value came from, and all that is wrong with it."""
