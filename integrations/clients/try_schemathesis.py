# /// script
# dependencies = ["schemathesis"]
# ///
