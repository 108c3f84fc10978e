"""Process groups between groups of workers, and the routes of batches between their ranks."""
