"""The kept completions of a run: files in `samples/` of the output folder, their index, and their readers."""
