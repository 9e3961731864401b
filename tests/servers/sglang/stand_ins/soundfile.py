"""SGLang imports this for audio, of which the tests have none."""
