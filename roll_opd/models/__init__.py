"""What the files of a Hugging Face model directory say; needs no torch."""
