"""Functions as jaxprs: traces them, reads them, runs them in parts."""
