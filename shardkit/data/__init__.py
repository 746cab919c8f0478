"""The order of samples, the loader that cuts it for a rank, and the data sets of our recipes."""
