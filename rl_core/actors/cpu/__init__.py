"""What exists only to make training quick on a CPU. Imported where the device is a CPU and nowhere else; results need none of it."""
