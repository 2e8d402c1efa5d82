import time, torch, io, pathlib, tempfile, statistics as st
torch.set_num_threads(1)
t=time.process_time(); import torchvision; print('import torchvision cpu s', time.process_time()-t)
from torchvision.io import decode_image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF
from PIL import Image
from hpcdist.data.images import FolderImages, TensorImages, resize
from hpcdist.data.batches import PreloadedSplit, AugmentedSplit
from hpcdist.data.augment import random_resized_box
def med(f,n=30):
    f(); ts=[]
    for _ in range(n):
        a=time.process_time(); f(); ts.append(time.process_time()-a)
    return min(ts)
d=pathlib.Path(tempfile.mkdtemp()); p=d/'x.jpg'
base=Image.effect_noise((500,375),40).convert('RGB').resize((60,45)).resize((500,375),Image.Resampling.BICUBIC); base.save(p,quality=90)
src=FolderImages([p],torch.tensor([0]),image_size=224,num_threads=1)
ours=med(lambda: src.image(0,12345))
def tv():
    im=decode_image(str(p)); l,t,r,b=random_resized_box(im.shape[2],im.shape[1],12345)
    return TF.resized_crop(im,t,l,b-t,r-l,[224,224],antialias=True)
theirs=med(tv)
print('folder image: ours ms',ours*1e3,'torchvision',theirs*1e3,'ratio',theirs/ours)
diff=(src.image(0,12345).int()-tv().int()).abs(); print('max diff',diff.max().item(), diff.float().mean().item())
# augment preloaded
imgs=torch.randint(0,256,(10000,3,32,32),dtype=torch.uint8); lab=torch.arange(10000)%10
sp=AugmentedSplit(PreloadedSplit(imgs,lab,mean=(.5,)*3,std=(.25,)*3),seed=0,flip=True)
idx=torch.randperm(10000)
def epoch():
    for _ in sp.batches(idx,batch_size=256,device=torch.device('cpu')): pass
o=med(epoch,3)
tr=v2.Compose([v2.RandomCrop(32,padding=4),v2.RandomHorizontalFlip(),v2.ToDtype(torch.float32,scale=True),v2.Normalize((.5,)*3,(.25,)*3)])
def epoch2():
    for part in idx.split(256): torch.stack([tr(imgs[i]) for i in part])
h=med(epoch2,1)
print('augment epoch 10000: ours',o,'v2 per image',h,'ratio',h/o)
plain=PreloadedSplit(imgs,lab,mean=(.5,)*3,std=(.25,)*3)
def epoch3():
    for _ in plain.batches(idx,batch_size=256,device=torch.device('cpu')): pass
o3=med(epoch3,3)
ds=torch.utils.data.TensorDataset(imgs,lab)
tr2=v2.Compose([v2.ToDtype(torch.float32,scale=True),v2.Normalize((.5,)*3,(.25,)*3)])
def epoch4():
    for x,y in torch.utils.data.DataLoader(ds,batch_size=256,sampler=idx.tolist()): tr2(x)
h4=med(epoch4,2)
print('plain epoch: ours',o3,'DataLoader',h4,'ratio',h4/o3)
g=torch.randint(0,256,(1797,1,8,8),dtype=torch.uint8)
print('resize diff', (resize(g,28).int()-TF.resize(g,[28,28],antialias=True).int()).abs().max(), med(lambda:resize(g,28)),med(lambda:TF.resize(g,[28,28],antialias=True)))
c=torch.randint(0,256,(50,3,40,32),dtype=torch.uint8)
print('resize diff3', (resize(c,28).int()-TF.resize(c,[28,28],antialias=True).int()).abs().max())
import numpy
print(numpy.__version__)
