"""The protocol of OpenAI: fields of requests, and answers whole or in events."""
