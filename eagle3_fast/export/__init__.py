"""From a training checkpoint to a folder that an engine serves, and the check of such a folder."""
