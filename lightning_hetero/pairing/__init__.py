"""How a worker gets the token: by a code, typed once on the coordinator's machine."""
