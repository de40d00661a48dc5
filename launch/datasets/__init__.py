"""What is trained on: how files are read, checked line by line, cut into batches, and kept back for evaluation."""
