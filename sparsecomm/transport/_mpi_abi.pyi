abi: str
built_for: str
