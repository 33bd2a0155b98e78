std = "lua54"
max_line_length = 120
cache = false
files["specs/families"] = { read_globals = { "library" } }
