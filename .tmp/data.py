import re
# --- readers reason
p='hpcdist/data/readers.py'; s=open(p).read()
s=s.replace('imports take 1.7 s and 1.2 s of CPU time in every rank,\nreading MNIST takes 0.1 s, and torchvision reads neither .gz files nor limits the unpacked size.','imports take 1.7 s and 1.9 s of CPU time in every\nrank, 20 times as long as to read MNIST, and torchvision reads no .gz files, which Debian\'s package has.')
open(p,'w').write(s)
# --- __init__
p='hpcdist/data/__init__.py'; s=open(p).read()
s=s[:s.index('\n\nclass DataParams')]+'\n'
s=s.replace('from typing import Protocol\n','')
open(p,'w').write(s.rstrip()+'\n')
# --- download
p='hpcdist/data/download.py'; s=open(p).read()
s=s.replace('from hpcdist.data import DataParams\n','from hpcdist.config.schema import DataConfig\n').replace('DataParams','DataConfig')
s=s.replace('from hpcdist.files.lock import NO_FLOCK, flock_if_possible','from hpcdist.files.lock import flock_if_possible')
s=s.replace('''CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
''','''CIFAR10_MD5 = {  # as in torchvision.datasets.CIFAR10
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
''')
s=s.replace('for file in CIFAR10_FILES)','for file in CIFAR10_MD5)')
a=s.index('    folders = [root / FOLDERS[name]]'); b=s.index('def find_or_raise')
s=s[:a]+'''    folders = [root / FOLDERS[name], *SYSTEM_FOLDERS.get(name, [])]
    return next((folder for folder in folders if _is_complete(name, folder)), None)


'''+s[b:]
s=s.replace('''SYSTEM_FOLDERS = {"fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}''','''SYSTEM_FOLDERS = {"fashion_mnist": [Path("/usr/share/datasets/fashion-mnist")]}''')
a=s.index('        try:\n            fcntl.flock'); b=s.index('        yield  # the lock')
s=s[:a]+'''        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.info("waiting for another process that downloads into %s", root)
            flock_if_possible(file)
'''+s[b:]
open(p,'w').write(s)
# --- images
p='hpcdist/data/images.py'; s=open(p).read()
s=s.replace('''augment.sample_hashes) selects a random crop, None the plain image. torchvision's ImageFolder is not used, because its
transforms do not get the index of the sample, and because an unreadable image raises an error without its path.
''','''augment.sample_hashes) selects a random crop, None the plain image. torchvision's ImageFolder is not used: its transforms
do not receive the index of the sample, it takes hidden folders for classes, and its errors do not name the file.
''')
s=s.replace('import os\nimport struct\nimport zlib\nfrom collections','from collections')
s=s.replace('from typing import Protocol\n','from typing import TypeAlias\n')
s=s.replace('import crop_image, random_flip, random_resized_box, sample_hashes','import crop_image, crop_params, random_resized_box, sample_hashes')
a=s.index('class ImageSource(Protocol)'); b=s.index('def resize(')
s=s[:a]+s[b:]
s=s.replace('''    for part, out in zip(
        torch.split(images, 4096), torch.split(resized, 4096), strict=True
    ):  # limits the memory for floats
''','''    # Parts limit the memory for floats.
    for part, out in zip(torch.split(images, 4096), torch.split(resized, 4096), strict=True):
''')
s=s.replace('''        # PIL's decoders document no exceptions for damaged content.
        except (
            *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, zlib.error),
            *(EOFError, MemoryError, NotImplementedError, RuntimeError, Image.DecompressionBombError),
        ) as error:
''','''        except Exception as error:  # PIL's decoders document no exceptions for damaged content
''')
s=s.replace('if crop_hash is not None and random_flip(crop_hash):','if crop_hash is not None and crop_params(crop_hash)[2]:')
s=s.replace('''    """Image files in one folder per class, read with PIL as RGB.

''','''    """Image files in one folder per class, read with PIL as RGB; torchvision.io reads no BMP, PPM and TIFF files.

''')
a=s.index('def class_names(')
s=s[:a]+'''ImageSource: TypeAlias = TensorImages | SyntheticImages | FolderImages
"""Labelled images of shape (C, H, W), available one by one (`image`, uint8 [C, H, W]) or all at once."""


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder`, one per class."""
    names = [path.name for path in _scan(folder) if path.is_dir()]
    if not names:
        raise DataError(f"{folder} has no class folders: image_folder expects {folder}/CLASS/IMAGE.jpg")
    return names


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    """Return the image files in `folder`/CLASS, sorted, and the label of each, int64 [N].

    Raises DataError for a class folder that is not in `classes` or has no images.
    """
    files: list[Path] = []
    labels: list[int] = []
    for name in class_names(folder):
        if name not in classes:
            raise DataError(f"{folder / name} is not a class of the training images")
        found = [path for path in _scan(folder / name) if path.suffix.lower() in IMAGE_SUFFIXES]
        if not found:
            raise DataError(f"{folder / name} has no images ({', '.join(IMAGE_SUFFIXES)})")
        files += found
        labels += [classes.index(name)] * len(found)
    return files, torch.tensor(labels)


def _scan(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}): check data.root") from error
'''
open(p,'w').write(s)
# --- augment
p='hpcdist/data/augment.py'; s=open(p).read()
s=s[:s.index('\n\ndef random_flip')].rstrip()+'\n'
s=s.replace('''torchvision's transforms draw from a global generator. Without one, an epoch that resumes in the middle, or on another
number of ranks, has exactly the same samples as an uninterrupted one.
''','''torchvision's transforms are not used: they draw from a global generator. Without one, an epoch that resumes in the
middle, or on another number of ranks, has exactly the same samples as an uninterrupted one.
''')
open(p,'w').write(s)
# --- loading
p='hpcdist/data/loading.py'; s=open(p).read()
s=s.replace('from hpcdist.data import DATASETS, DataParams, DatasetSpec','from hpcdist.config.schema import DataConfig\nfrom hpcdist.data import DATASETS, DatasetSpec').replace('DataParams','DataConfig')
s=s.replace('import AugmentedSplit, PreloadedSplit, Split, StreamingSplit','import PreloadedSplit, Split, StreamingSplit')
s=s.replace('from hpcdist.data.download import IDX_FILES, find_or_raise, idx_file','from hpcdist.data.download import CIFAR10_MD5, IDX_FILES, find_or_raise, idx_file')
s=s.replace('from hpcdist.data.readers import CIFAR10_MD5, read_cifar10_batch','from hpcdist.data.readers import read_cifar10_batch')
s=s.replace('''    """Both splits of a dataset. Mean and std are per channel, of pixels scaled to [0, 1]."""
''','''    """Both splits of a dataset."""
''')
s=s.replace('''    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class _Sources:
    train: ImageSource
    test: ImageSource
    num_classes: int
''','''    image_size: int


_Sources = tuple[ImageSource, ImageSource, int]  # training and test images, and the number of classes
''')
s=s.replace('''    sources = _sources(data, spec, size, seed)
    return ImageData(
        train=_split(sources.train, data, spec, seed if data.augment else None),
        test=_split(sources.test, data, spec, None),
        num_classes=sources.num_classes,
        in_channels=spec.in_channels,
        image_size=size,
        mean=spec.mean,
        std=spec.std,
    )
''','''    train, test, num_classes = _sources(data, spec, size, seed)
    return ImageData(
        train=_split(train, data, spec, seed if data.augment else None),
        test=_split(test, data, spec, None),
        num_classes=num_classes,
        in_channels=spec.in_channels,
        image_size=size,
    )
''')
a=s.index('    num_bytes = len(source.labels)'); b=s.index('def _sources(')
s=s[:a]+'''    num_bytes = len(source.labels) * torch.Size(source.shape).numel()
    small = num_bytes <= PRELOAD_MAX_BYTES
    if data.preload == "always" or (data.preload == "auto" and small and not needs_files):
        log.info("preloading %d images, %.0f MB", len(source.labels), num_bytes / 1e6)
        return PreloadedSplit(
            source.all_images(),
            source.labels,
            mean=spec.mean,
            std=spec.std,
            augment_seed=augment_seed,
            flip=spec.flip,
        )
    return StreamingSplit(source, mean=spec.mean, std=spec.std, num_workers=data.num_workers, augment_seed=augment_seed)


'''+s[b:]
s=s.replace('return _Sources(train, test, spec.num_classes)','return train, test, spec.num_classes').replace('return _Sources(train, test, len(classes))','return train, test, len(classes)').replace('return _Sources(make(data.num_samples, 0), test, data.num_classes)','return make(data.num_samples, 0), test, data.num_classes')
open(p,'w').write(s)
# --- batches
p='hpcdist/data/batches.py'; s=open(p).read()
a=s.index('class Split(Protocol)'); b=s.index('def eval_indices(')
s=s[:a]+s[b:]
a=s.index('class PreloadedSplit:'); b=s.index('def _place(')
s=s[:a]+'''class PreloadedSplit:
    """A whole split in memory, on the device if it fits; a batch is gathered by index.

    It is not a DataLoader with torchvision's transforms, which takes 20 times as long for augmented images of 32 x 32
    pixels, and 7 times for plain ones.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        augment_seed: seed of random shifts and, with `flip`, mirroring (see augment.py); None disables them.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment_seed: int | None = None,
        flip: bool = False,
    ) -> None:
        self.images = images
        self.labels = labels
        self.mean = mean
        self.std = std
        self.augment_seed = augment_seed
        self.flip = flip
        self._tables: dict[tuple[torch.device, bool], _Table] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self,
        indices: Tensor,
        *,
        batch_size: int,
        device: torch.device,
        start_batch: int = 0,
        epoch: int = 0,
        channels_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batches of `indices` (int64 [n], on the CPU) from number `start_batch` on.

        `epoch` changes the augmentation. If the device holds the split, a batch needs neither a copy nor a
        synchronisation.
        """
        rest = indices[start_batch * batch_size :]
        if len(rest) == 0:  # torch.split returns one empty batch for it
            return
        table = self._table(device, channels_last)
        # One gather for the labels of the whole epoch, so that those of a batch are a view.
        labels = torch.split(table.labels.index_select(0, rest.to(device)), batch_size)
        if self.augment_seed is None:
            images = _gathered(table, rest, batch_size, device, channels_last)
        else:
            hashes = sample_hashes(self.augment_seed, epoch, rest)
            images = self._crops(table, rest, hashes, batch_size, device, channels_last)
        yield from zip(images, labels, strict=True)

    def _table(self, device: torch.device, channels_last: bool) -> _Table:
        """Return the images on their device, normalised if they are small enough.

        They are [N, C, H, W], or [N, H, W, C] for channels_last; for augmentation the pixels of all padded images,
        uint8 [N * H * W, C].
        """
        key = (device, channels_last)
        if key not in self._tables:
            normalize = Normalize(self.mean, self.std, device)
            if self.augment_seed is not None:
                padded = pad(self.images).permute(0, 2, 3, 1).flatten(0, 2)
                images = padded.to(_place(padded, device))
            else:
                images = self.images.to(_place(self.images, device))
                if images.device.type == device.type and 4 * images.numel() <= FLOAT_TABLE_MAX_BYTES:
                    images = normalize(images)
                if channels_last:
                    images = images.permute(0, 2, 3, 1).contiguous()
            self._tables[key] = _Table(images, self.labels.to(device), normalize)
        return self._tables[key]

    def _crops(
        self,
        table: _Table,
        indices: Tensor,
        hashes: Tensor,
        batch_size: int,
        device: torch.device,
        channels_last: bool,
    ) -> Iterator[Tensor]:
        """Yield batches of cropped images; a batch is one gather of pixels from the padded images."""
        channels, height, width = self.images.shape[1:]
        padded_height, padded_width = height + 2 * CROP_PADDING, width + 2 * CROP_PADDING
        top, left, mirror = crop_params(hashes)
        corners = (indices * padded_height + top) * padded_width + left
        plain_grid = torch.arange(height)[:, None] * padded_width + torch.arange(width)
        mirrored_grid = plain_grid.flip(1) if self.flip else plain_grid
        place = table.images.device
        grids = torch.stack([plain_grid.flatten(), mirrored_grid.flatten()]).to(place)
        for corner, grid_number in zip(
            torch.split(corners.to(place), batch_size), torch.split(mirror.to(place), batch_size), strict=True
        ):
            pixels = (corner[:, None] + grids.index_select(0, grid_number)).flatten()
            images = table.images.index_select(0, pixels).reshape(-1, height, width, channels)
            images = _to_device(images, device).permute(0, 3, 1, 2)
            yield table.normalize(images if channels_last else images.contiguous())


def _gathered(
    table: _Table, indices: Tensor, batch_size: int, device: torch.device, channels_last: bool
) -> Iterator[Tensor]:
    """Yield batches of images as they are."""
    for part in torch.split(indices.to(table.images.device), batch_size):
        images = _to_device(table.images.index_select(0, part), device)
        if channels_last:
            images = images.permute(0, 3, 1, 2)
        yield images if table.images.is_floating_point() else table.normalize(images)


'''+s[b:]
s=s.replace('''        """See Split.batches. Images are copied to the device as bytes, a quarter of the size of floats."""
''','''        """See PreloadedSplit.batches. Images are copied to the device as bytes, a quarter of the size of floats."""
''')
a=s.index('@dataclass(frozen=True)\nclass _EpochImages')
s=s.rstrip()+'''


Split: TypeAlias = PreloadedSplit | StreamingSplit
"""Images for training or testing, with `labels` int64 [N] on the CPU."""
'''
s=s.replace('from typing import Protocol\n','from typing import TypeAlias\n')
open(p,'w').write(s)
