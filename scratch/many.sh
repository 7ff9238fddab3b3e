# usage: many.sh OUT < lines of args ; runs all side by side
export PYTHONPATH=src OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
O=$1; mkdir -p $O
i=0
while read -r line; do i=$((i+1)); echo "$i: $line"; ( python3 scratch/try.py $line > $O/$i.txt 2>&1; ) & 
  while [ $(jobs -r | wc -l) -ge 15 ]; do sleep 0.5; done
done
wait
for f in $(ls $O | sort -n); do echo "== $f"; grep -v -E "━━" $O/$f | tail -12; done
