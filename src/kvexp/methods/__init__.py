"""Methods: a folder for each family, one file for each method; `conf/method/*.yaml` is the registry."""
