"""What people watch: the progress line, figures as JSON lines, boards, pictures, and a log of each process."""
