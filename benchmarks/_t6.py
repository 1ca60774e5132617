import sys; sys.path.insert(0,'tests/amp')
import torch
from op_samples import SAMPLES
from mezzo import amp
from mezzo.amp._ops import WITHOUT_HALF_KERNEL
dev=sys.argv[1] if len(sys.argv)>1 else "cpu"
for dt in ("float16","bfloat16"):
    bad=[]
    for v in SAMPLES:
        if v in WITHOUT_HALF_KERNEL: continue
        p=amp.Policy.create("O1",dt,custom_white_list=[v],cpu_compute="native")
        def t(*s): return (torch.rand(*s)*.8+.1).requires_grad_()
        try:
            with torch.device(dev):
                with amp.auto_cast(policy=p): out=SAMPLES[v](t)
                out=out[0] if isinstance(out,tuple) else out
                if out.dtype!=p.dtype: bad.append((v,out.dtype)); continue
                if out.requires_grad: out.float().sum().backward()
        except Exception as e: bad.append((v,type(e).__name__,str(e)[:70]))
    print(dt); [print("   ",b) for b in bad]
