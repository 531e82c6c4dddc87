"""Orders of prompts, one file each: a class found by the module's name. Its base is interlace.data.sampling."""
