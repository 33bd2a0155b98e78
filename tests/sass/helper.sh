# For tests of machine code, sourced from the top folder; they end with `exit $failed`.
check=tests/sass/early_release.lua
compile=build/nmc-toy/nmk-compile
work=build/tests/sass
mkdir -p $work
failed=0

verdict() { # NAME STATUS WHY
  if [ "$2" = 0 ]; then
    echo "ok - sass $1"
  else
    echo "not ok - sass $1: $3" && failed=1
  fi
}

# Compiles KERNEL, and judges its machine code.
judge() { # MODEL KERNEL
  local model=$1 code
  $compile --allow-spills -o $work/$model.cubin "$2" || { verdict "$model compiles" 1 "see above"; return; }
  lua5.4 $check $work/$model.cubin nmk_step >$work/$model.log 2>&1
  code=$? # 1: it found something; 2: it could not judge
  cat $work/$model.log
  [ $code -le 1 ] && ! grep -q 'arrive at' $work/$model.log
  verdict "$model releases no buffer early" $? "see above"
  grep -q ' 0 spill' $work/$model.log
  verdict "$model uses no local memory" $? "$(grep -o '[0-9]* spill' $work/$model.log)s or arrays with computed index"
}

# NAME.cubin of the small kernels, or the end of the test: where they do not compile nothing does.
small_kernels() { # NAME
  if [ ! -x $compile ]; then
    echo "not ok - sass: $compile is not built"
    exit 1
  fi
  $compile --no-cache --allow-spills -o $work/$1.cubin tests/sass/kernels.cu >$work/$1.log 2>&1 && return
  if grep -qi 'nvrtc' $work/$1.log && ! ls /usr/local/cuda*/lib64/libnvrtc.so* >/dev/null 2>&1; then
    echo "skip - sass: no NVRTC"
    exit 0
  fi
  cat $work/$1.log
  echo "not ok - sass: the small kernels do not compile"
  exit 1
}
