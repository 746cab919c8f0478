"""The few models our recipes train; a recipe may name any other by its dotted path."""
