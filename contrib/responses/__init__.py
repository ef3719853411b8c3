"""OpenAI's Responses API, at the endpoint of agents."""
