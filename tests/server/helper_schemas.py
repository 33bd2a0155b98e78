"""Random JSON schemas, and a judge of documents that is none of ours.

    helper_schemas.py make COUNT SEED     a schema a line, of what server/schema.c takes and a little more
    helper_schemas.py judge               reads "schema TAB document" lines, prints those that are not valid
"""
import json
import random
import sys

import jsonschema

NAMES = ["id", "name", "tags", "value", "a", "ab", "abc", "é", "two words", 'q"uote', "back\\slash", "x1", "next", "型"]
WORDS = ["red", "green", "blue", "", "a\"b", "tab\there", "new\nline", "日本", "\\", "reddish", "true", "0"]
PATTERNS = ["^[a-z]+$", "^\\d{3}-\\d{4}$", "^(foo|bar)?[A-Z]{2,}$", "^.{0,5}$", "x", "^[^\"]*$", "\\s", "^\\w+@\\w+\\.com$",
            "^\\S+ \\S+$", "^[\\u00e0-\\u00ff]{1,3}$", "^\"quoted\\\\\"$", "a|b$", "^(?:[01]\\d|2[0-3]):[0-5]\\d$", "^a.c$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration"]


class Maker:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def chance(self, p):
        return self.r.random() < p

    def number(self):
        return self.r.choice([0, 1, -1, 7, -12, 100, 2.5, -0.25, 0.1, 1e3, -1e-3, 123456, 9007199254740991, 0.375])

    def integer(self):
        s = {"type": "integer"}
        if self.chance(0.5):
            low = self.r.choice([-1000, -17, -1, 0, 1, 5, 99, -9007199254740991])
            s[self.r.choice(["minimum", "exclusiveMinimum"])] = low
            if self.chance(0.7):
                s[self.r.choice(["maximum", "exclusiveMaximum"])] = low + self.r.choice([2, 3, 10, 1000, 12345678])
        elif self.chance(0.3):
            s["maximum"] = self.r.choice([-5, 0, 3.5, 250])
        return s

    def real(self):
        s = {"type": "number"}
        if self.chance(0.5):
            low = self.number()
            s[self.r.choice(["minimum", "exclusiveMinimum"])] = low
            if self.chance(0.6):
                s[self.r.choice(["maximum", "exclusiveMaximum"])] = low + self.r.choice([0.5, 0.001, 1, 3, 1000.125])
        elif self.chance(0.3):
            s["exclusiveMaximum"] = self.number()
        return s

    def string(self):
        s = {"type": "string"}
        kind = self.r.random()
        if kind < 0.3:
            if self.chance(0.7):
                s["minLength"] = self.r.randrange(4)
            if self.chance(0.7):
                s["maxLength"] = self.r.randrange(3, 12)
        elif kind < 0.45:
            s["pattern"] = self.r.choice(PATTERNS)
        elif kind < 0.6:
            s["format"] = self.r.choice(FORMATS)
        return s

    def array(self, depth):
        s = {"type": "array"}
        if self.chance(0.8):
            s["items"] = self.schema(depth - 1)
        if self.chance(0.25):
            s["prefixItems"] = [self.schema(depth - 1) for _ in range(self.r.randrange(1, 4))]
            if self.chance(0.3):
                s["items"] = self.r.choice([True, False])
        if self.chance(0.5):
            s["minItems"] = self.r.randrange(3)
        if self.chance(0.6):
            s["maxItems"] = s.get("minItems", 0) + self.r.randrange(4)
        return s

    def object(self, depth):
        s = {"type": "object"}
        names = self.r.sample(NAMES, self.r.randrange(5))
        if names or self.chance(0.8):
            s["properties"] = {n: self.schema(depth - 1) for n in names}
        required = [n for n in names if self.chance(0.5)]
        if required:
            s["required"] = required
        extra = self.r.random()
        if extra < 0.4:
            s["additionalProperties"] = False
        elif extra < 0.5:
            s["additionalProperties"] = True
        elif extra < 0.6:
            s["additionalProperties"] = self.schema(depth - 1)
        if self.chance(0.1) and required:
            s["minProperties"] = len(required)
        return s

    def schema(self, depth):
        kinds = ["string", "integer", "real", "bool", "null", "enum", "const", "types"]
        if depth > 0:
            kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "oneOf", "allOf", "ref", "any"]
        kind = self.r.choice(kinds)
        if kind == "string":
            s = self.string()
        elif kind == "integer":
            s = self.integer()
        elif kind == "real":
            s = self.real()
        elif kind == "bool":
            s = {"type": "boolean"}
        elif kind == "null":
            s = {"type": "null"}
        elif kind == "enum":
            s = {"enum": self.r.sample(WORDS, self.r.randrange(1, 5)) + self.r.choice([[], [None], [3, 1.5], [{"a": [1]}]])}
        elif kind == "const":
            s = {"const": self.r.choice(WORDS + [0, True, None, {"k": "v w"}, [1, "x"], -2.5])}
        elif kind == "types":
            s = {"type": self.r.sample(["string", "integer", "number", "boolean", "null"], 2)}
            if "string" in s["type"] and self.chance(0.5):
                s["maxLength"] = self.r.randrange(8)
        elif kind == "object":
            s = self.object(depth)
        elif kind == "array":
            s = self.array(depth)
        elif kind == "anyOf":
            s = {"anyOf": [self.schema(depth - 1) for _ in range(self.r.randrange(1, 4))]}
            if self.chance(0.2):
                s = {"type": "object", "properties": {"id": self.integer()}, "required": ["id"],
                     "anyOf": [{"properties": {"name": self.string()}, "required": ["name"]},
                               {"properties": {"value": self.schema(depth - 1)}}]}
        elif kind == "oneOf":
            s = {"oneOf": [{"type": "object", "properties": {"kind": {"const": w}, w: self.schema(depth - 1)},
                            "required": ["kind"]} for w in self.r.sample(["circle", "square", "line"], 2)]}
            if self.chance(0.3):
                s = {"oneOf": [self.string(), self.integer(), {"type": "null"}]}
        elif kind == "allOf":
            s = {"allOf": [{"type": "object", "properties": {"a": self.schema(depth - 1)}, "required": ["a"]},
                           {"properties": {"value": self.schema(depth - 1)}}]}
            if self.chance(0.3):
                s = {"allOf": [{"type": "integer", "minimum": -3}, {"maximum": 40}, {"minimum": 1}]}
        elif kind == "ref":
            s = {"$ref": self.r.choice(["#/$defs/tree", "#/$defs/leaf", "#"])}
        else:
            s = self.r.choice([{}, True, {"description": "anything"}])
        if isinstance(s, dict) and self.chance(0.1) and "$ref" not in s:
            s["title"] = "a title"
        return s

    def document(self):
        s = self.object(3) if self.chance(0.7) else self.schema(3)
        if not isinstance(s, dict):
            s = {}
        s["$defs"] = {
            "leaf": self.string(),
            "tree": {"type": "object", "properties": {"leaf": {"$ref": "#/$defs/leaf"},
                     "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                     "required": ["leaf"], "additionalProperties": False}}
        return s


def make(count, seed):
    maker = Maker(seed)
    for _ in range(count):
        print(json.dumps(maker.document(), ensure_ascii=maker.chance(0.5)))


def judge():
    bad = 0
    validator = jsonschema.Draft202012Validator
    checker = getattr(validator, "FORMAT_CHECKER", None) or jsonschema.draft202012_format_checker
    for line in sys.stdin:
        schema, text = line.rstrip("\n").split("\t")
        schema, text = json.loads(schema), json.loads(text)
        try:
            validator(schema, format_checker=checker).validate(json.loads(text))
        except Exception as e:
            bad += 1
            if bad <= 20:
                print("invalid:", json.dumps(schema), "document:", text, "because:", str(e).split("\n")[0])
    print(f"{bad} invalid")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.stdin.reconfigure(encoding="utf-8")
    if sys.argv[1] == "make":
        make(int(sys.argv[2]), int(sys.argv[3]))
    else:
        judge()
