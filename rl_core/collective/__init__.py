"""Process groups between groups of workers."""
