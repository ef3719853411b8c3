"""OpenAI's Responses API at the agent endpoint."""
