"""A small order application on delayq, and the people who use it for ten seconds."""
