"""The launcher: checks a recipe, makes the run folder, and lets torch's elastic agent run the ranks."""
