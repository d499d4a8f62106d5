"""What a run is worth: reports now; fine-tuning on tasks, significance and layer similarity beside them."""
