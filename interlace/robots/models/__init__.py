"""Vision-language-action models and their action decoding."""
