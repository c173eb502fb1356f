"""Why a worker cannot be used, hop by hop."""
