import sys, time, os, shutil, torch
from pathlib import Path
torch.set_num_threads(int(os.environ.get("TH","1")))
from unmask.training.recipe import load_recipe
from unmask.training.run import train, load_run
from unmask.decoding.generate import generate
from unmask.decoding.policies import *
from unmask.tasks.diversity import *
name, *ov = sys.argv[1:]
out=Path(f"/tmp/runs/{os.getpid()}")
c0=time.process_time(); w0=time.time()
r=load_recipe(name, ov)
train(r,out,force=True)
c1=time.process_time()
model,plain,r,task=load_run(out)
ids=torch.arange(1000); ex=task.examples(ids,"test")
prompt=torch.where(ex.response,model.denoiser.mask_token_id,ex.tokens)
def ev(d,p,S):
    o=generate(d,prompt,p,S,seed=1,temperature=1.0)
    v=task.valid(o.tokens,ex)
    return f"{p.name}@{S}: {v.float().mean():.3f} steps {o.num_steps.float().mean():.2f} distinct {num_distinct(o.tokens[v])}/{int(v.sum())}"
print(ov, f"train cpu {c1-c0:.1f}")
if model.selector: print(ev(model.denoiser,Learned(model.selector,model.selection),r.order.budget), distinct_range(task,1000) if task.unconditional else "")
for S in r.evaluate.budgets:
    print("  ", "; ".join(ev(plain.denoiser,p,S) for p in (IID(),TopProbability(),Margin())))
print(f"total cpu {time.process_time()-c0:.1f} wall {time.time()-w0:.1f}")
