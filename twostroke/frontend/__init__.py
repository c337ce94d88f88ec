"""The OpenAI HTTP application over any executor: tokenizer, chat template, detokenizer. No torch."""
