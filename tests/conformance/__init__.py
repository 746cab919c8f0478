"""One suite over all backends: every promise, against one process of plain torch."""
