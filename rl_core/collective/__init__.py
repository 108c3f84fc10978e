"""Process groups between roles."""
