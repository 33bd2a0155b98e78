#!/bin/bash
# Documents of random tokens under the masks of random schemas, judged by python3-jsonschema.
# `make schemas` asks for more of them, or others.
cd "$(dirname "$0")/../.." || exit 2
count=${NMK_SCHEMAS:-2000} seed=${NMK_SCHEMAS_SEED:-1}
out=build/tests/grammar_documents
mkdir -p $out
if ! python3 -c 'import jsonschema' 2>$out/python.txt; then
  echo "skip - documents of $count random schemas: no python3-jsonschema"
  exit 0
fi
python3 tests/server/helper_schemas.py make "$count" "$seed" >$out/schemas.txt &&
  build/tests/nmc-toy/server/grammar_masks walk "$seed" <$out/schemas.txt >$out/documents.txt 2>$out/walk.txt &&
  python3 tests/server/helper_schemas.py judge <$out/documents.txt >$out/judged.txt
rc=$?
read -r documents _ refused _ unfinished _ wrong _ <<<"$(tail -n 1 $out/walk.txt)"
echo "# $count schemas: $(tail -n 1 $out/walk.txt); $(tail -n 1 $out/judged.txt)"
# Few are refused, as nothing satisfies them; few walks find no end.
good=$((rc == 0 && wrong == 0 && documents * 100 >= count * 93 && refused * 100 <= count * 6 && unfinished * 100 <= count * 2))
if [ $good = 1 ] && [ "$(cat $out/judged.txt)" = "0 invalid" ]; then
  echo "ok - documents of $count random schemas are valid"
else
  head -n 5 $out/judged.txt
  echo "not ok - documents of $count random schemas are valid: see $out"
  exit 1
fi
