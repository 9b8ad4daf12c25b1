"""The job against live servers: any OpenAI-compatible one, over streaming HTTP, measured from the intended start."""
