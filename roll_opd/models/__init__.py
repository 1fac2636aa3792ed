"""Read the files of a Hugging Face model directory without torch: sizes, weights, tokenizers, memory estimates."""
