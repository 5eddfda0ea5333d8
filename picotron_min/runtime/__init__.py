"""What makes a run practical: config, files, processes, and what the user sees."""
