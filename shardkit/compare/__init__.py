"""Whether arms of a run are equal, what each costs, and which to pick."""
