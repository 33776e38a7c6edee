"""The transformer (GPT and Llama families), and Hugging Face weights in and out."""
