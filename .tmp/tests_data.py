import re,pathlib
T=pathlib.Path('tests/unit/data')
# conftest unchanged
p=T/'test_augment.py'; s=p.read_text()
s=s.replace('crop_image, crop_params, random_flip, random_resized_box','crop_image, crop_params, random_resized_box')
s=s.replace('''    assert random_flip(mirrored)
    assert not random_flip(centred)
''','')
for a,b in {
'"""The reference in plain integers; https://prng.di.unimi.it/splitmix64.c with the step as a product."""':'"""Return the hash in Python integers: https://prng.di.unimi.it/splitmix64.c with the step as a product."""',
'test_hashes_equal_the_reference_in_plain_integers':'test_sample_hashes_equal_a_reference_in_python_integers',
'test_hashes_do_not_depend_on_the_company_and_differ_by_seed_and_epoch':'test_sample_hashes_depend_on_seed_epoch_and_index_only',
'test_crops_are_spread_evenly':'test_crop_params_are_uniform_and_uncorrelated',
'test_crop_image_shifts_and_mirrors':'test_crop_image_shifts_and_mirrors_by_the_hash',
"upper_left = 0  # top 0, left 0: the image's corner comes to rest at (4, 4), out of sight":"upper_left = 0  # top 0, left 0: the crop has padding only",
'test_random_resized_box_keeps_to_area_and_ratio':'test_random_resized_box_respects_area_and_aspect_ratio',
'test_global_generators_are_left_alone':'test_augmentation_does_not_use_global_generators',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'test_batches.py'; s=p.read_text()
s=s.replace('import AugmentedSplit, PreloadedSplit, Split, StreamingSplit, eval_indices','import PreloadedSplit, Split, StreamingSplit, eval_indices')
s=s.replace('''    plain = PreloadedSplit(source.images, source.labels, mean=MEAN, std=STD)
    return AugmentedSplit(plain, seed=7, flip=source.flip) if kind == "augmented" else plain
''','''    augment_seed = 7 if kind == "augmented" else None
    return PreloadedSplit(
        source.images, source.labels, mean=MEAN, std=STD, augment_seed=augment_seed, flip=source.flip
    )
''')
for a,b in {
'test_start_in_the_middle_equals_the_tail_of_the_epoch':'test_start_batch_continues_an_epoch_exactly',
'  # a resumed process has another history of random numbers':'  # the global generator of a resumed process has another state',
'test_augmentation_varies_by_epoch_and_not_by_batching':'test_augmentation_depends_on_the_epoch_and_not_on_the_batches',
'test_global_generators_are_left_alone':'test_batches_do_not_use_global_generators',
'test_no_indices_no_batches':'test_empty_indices_yield_no_batches',
'test_the_consumer_may_change_a_batch':'test_changing_a_batch_in_place_does_not_change_the_split',
'test_worker_processes_give_the_same_batches':'test_worker_processes_yield_the_same_batches',
'    here = run(':'    in_process = run(','    there = run(':'    in_workers = run(','zip(there, here,':'zip(in_workers, in_process,',
'test_unreadable_image_in_a_stream_is_one_sentence':'test_unreadable_image_in_a_worker_raises_an_error_of_one_line',
'test_a_split_that_fills_the_gpu_stays_on_the_host':'test_split_larger_than_half_of_the_free_gpu_memory_stays_on_the_host',
'test_batches_hold_the_images_of_the_indices':'test_batches_contain_the_normalised_images_of_the_indices',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'test_download.py'; s=p.read_text()
a=s.index('@dataclass(frozen=True, kw_only=True)\nclass Params'); b=s.index('def write_files(')
s=s[:a]+s[b:]
s=s.replace('from dataclasses import dataclass\n','').replace('from hpcdist.data import download\n','from hpcdist.config.schema import DataConfig\nfrom hpcdist.data import download\n')
s=s.replace('import CIFAR10_FILES, FOLDERS, IDX_FILES,','import CIFAR10_MD5, FOLDERS, IDX_FILES,').replace('from hpcdist.data.readers import CIFAR10_MD5\n','')
s=s.replace('Params(','DataConfig(')
a=s.index('\n\ndef test_the_files_of_cifar10_are'); s=s[:a].rstrip()+'\n'
for a,b in {
'"""What a download leaves: torchvision keeps the packed files beside the others."""':'"""Write the files of a download by torchvision, which keeps the packed files as well."""',
'test_missing_and_not_allowed_to_download':'test_missing_dataset_without_download_raises_an_error_with_advice',
'test_image_folder_is_never_downloaded':'test_image_folder_is_not_downloaded',
'test_nothing_to_prepare':'test_prepare_writes_nothing_for_datasets_without_files',
'test_download_lands_in_torchvisions_layout':'test_download_has_the_layout_of_torchvision',
'test_download_completes_what_is_there_in_part':'test_download_replaces_an_incomplete_dataset_and_removes_stale_folders',
'test_download_that_fails_half_way_leaves_nothing':'test_failed_download_leaves_no_files',
'test_root_that_cannot_be_made':'test_root_that_cannot_be_created_raises_data_error',
'test_no_network':'test_download_without_network_raises_data_error',
'def note(message':'def set_event(message','"info", note)':'"info", set_event)',
'test_second_process_waits_and_does_not_download_again':'test_concurrent_process_waits_and_does_not_download_again',
'{"fashion_mnist": system}':'{"fashion_mnist": [system]}',
'test_system_folder_is_a_last_resort':'test_system_folder_is_used_if_the_root_has_no_dataset',
'test_home_is_expanded':'test_home_folder_in_the_root_is_expanded',
'test_what_is_missing_is_told_without_torch':'test_missing_works_without_torch',
'    """A login node has none."""\n':'',
'test_what_needs_no_files_is_never_missing':'test_datasets_without_files_are_not_missing',
'test_what_is_there_is_not_missing':'test_existing_dataset_is_not_missing',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'test_images.py'; s=p.read_text()
for a,b in {
'test_resize_is_pillows_bilinear_to_a_rounding':'test_resize_differs_from_pillow_by_rounding_only',
'test_tensor_images_resize_alike_one_by_one_and_at_once':'test_tensor_images_are_equal_one_by_one_and_at_once',
'test_synthetic_is_the_same_one_by_one_and_at_once_and_for_the_same_seed':'test_synthetic_images_depend_on_seed_and_split_only',
'test_synthetic_can_be_learned':'test_nearest_class_mean_classifies_all_synthetic_images',
'    """The nearest class mean of the training images tells every test image."""\n':'',
'test_folder_images_of_one_colour':'test_folder_images_ignore_hidden_entries_and_other_files',
'"left by another system"':'"metadata of macOS"',
'test_folder_image_shows_the_centre_and_crops_at_random':'test_folder_image_is_the_centre_or_a_crop_by_the_hash',
'test_folder_image_mirrors_by_its_hash':'test_folder_image_is_mirrored_by_the_hash',
'test_a_damaged_image_is_refused_or_read':'test_damaged_image_is_read_or_raises_data_error',
"ignore::UserWarning\")  # PIL's, of damaged metadata":"ignore::UserWarning\")  # PIL warns about damaged metadata",
'test_unreadable_image_is_named':'test_error_of_an_unreadable_image_names_the_file',
'test_folder_without_classes':'test_folder_without_class_folders_raises_data_error',
'test_folder_that_cannot_be_listed':'test_missing_folder_raises_data_error',
'test_class_without_images':'test_class_folder_without_images_raises_data_error',
'test_class_that_training_does_not_know':'test_class_that_training_lacks_raises_data_error',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'test_loading.py'; s=p.read_text()
a=s.index('@dataclass(frozen=True, kw_only=True)\nclass Params'); b=s.index('def write_idx(')
s=s[:a]+'''def params(name: str, **changes: Any) -> DataConfig:
    values = {"root": "/nowhere", "download": False, "num_workers": 0, "num_samples": 40, "num_classes": 4}
    return DataConfig(**{"name": name, **values, **changes})


'''+s[b:]
s=re.sub(r'Params\(name=("\w+"|name)',r'params(\1',s)
s=s.replace('    params = params(','    config = params(').replace('load_datasets(params, seed=0)','load_datasets(config, seed=0)')
s=s.replace('from dataclasses import dataclass\n','').replace('from pathlib import Path\n','from pathlib import Path\nfrom typing import Any\n')
s=s.replace('from hpcdist.data import DATASET_NAMES,','from hpcdist.config.schema import DataConfig\nfrom hpcdist.data import DATASET_NAMES,')
s=s.replace('import AugmentedSplit, PreloadedSplit, StreamingSplit','import PreloadedSplit, StreamingSplit')
s=s.replace('data.mean[0]','data.test.mean[0]').replace('data.std[0]','data.test.std[0]')
s=s.replace('''    for number, name in enumerate(readers.CIFAR10_MD5):''','''    for number, name in enumerate(CIFAR10_MD5):''').replace('from hpcdist.data.download import IDX_FILES','from hpcdist.data.download import CIFAR10_MD5, IDX_FILES')
s=s.replace('''    assert isinstance(data.train, AugmentedSplit)
    assert (data.train.seed, data.train.flip) == (9, flip)
    assert isinstance(data.test, PreloadedSplit)
''','''    assert isinstance(data.train, PreloadedSplit)
    assert (data.train.augment_seed, data.train.flip) == (9, flip)
    assert data.test.augment_seed is None
''')
for a,b in {
'"""A tiny MNIST: image i of 28x28 is all i, its label i mod 10; the test split packed."""':'"""Write a small MNIST: all pixels of image i are i, its label is i mod 10; the files of the test split are packed."""',
'def test_digits() ->':'def test_digits_are_split_by_class_and_normalised() ->',
'test_digits_do_not_depend_on_the_seed':'test_split_of_digits_does_not_depend_on_the_seed',
'def test_idx_sets(':'def test_mnist_like_datasets_are_loaded_from_idx_files(',
'def test_image_size_resizes(':'def test_images_are_resized_to_image_size(',
'def test_truncated_file_is_named(':'def test_error_of_a_truncated_file_names_the_file(',
'def test_missing(':'def test_missing_dataset_raises_data_error(',
'def test_cifar10(':'def test_cifar10_joins_the_training_files_in_order(',
'def test_image_folder(':'def test_image_folder_is_loaded_with_val_or_test_images(',
'def test_image_folder_without_test_images(':'def test_image_folder_without_test_images_raises_data_error(',
'def test_image_folder_streams_where_it_augments(':'def test_augmented_image_folder_is_streamed(',
'def test_image_folder_cannot_augment_what_is_preloaded(':'def test_preloaded_image_folder_with_augmentation_raises_config_error(',
'def test_synthetic(':'def test_synthetic_dataset_has_a_test_set_of_a_fifth(',
'def test_what_is_preloaded(':'def test_split_is_preloaded_or_streamed_by_preload_and_size(',
'def test_preloaded_and_streamed_show_the_same(':'def test_preloaded_and_streamed_batches_are_equal(',
'def test_only_training_images_are_augmented_and_digits_are_not_mirrored(':'def test_only_training_images_are_augmented_and_only_mirrored_where_classes_allow_it(',
'def test_every_dataset_has_facts_for_each_channel(':'def test_every_dataset_has_mean_and_std_for_each_channel(',
'def test_small_sets_load_without_slow_imports(':'def test_small_datasets_load_without_slow_imports(',
'def test_mnist_is_centred_by_its_mean_and_std(':'def test_mnist_has_mean_zero_and_std_one_after_normalisation(',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'test_readers.py'; s=p.read_text()
a=s.index('@pytest.mark.parametrize("suffix", ["", ".gz"])\ndef test_no_more_is_unpacked'); b=s.index('def test_empty_idx_is_damaged')
s=s[:a]+'''def test_idx_file_that_does_not_match_its_header_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 3, 4) + bytes(100))
    with pytest.raises(DataError, match="is truncated or damaged: 40 bytes expected, 116 found"):
        read_idx(path)
    path.write_bytes(bytes([0, 0, 8, 4]) + b"\\xff" * 16)
    with pytest.raises(DataError, match=r"is truncated or damaged: 3402823\\d+ bytes expected, 20 found"):
        read_idx(path)
    path.write_bytes(bytes([0, 0, 8, 255]) + b"\\xff" * 1020)
    with pytest.raises(DataError, match="is not an IDX file"):
        read_idx(path)


def test_unpacked_size_of_a_gz_file_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress(bytes(100_000_000)))
    assert len(readers.read_bytes(path, max_bytes=1000)) == 1000
    assert len(readers.read_bytes(path)) == readers.MAX_BYTES


'''+s[b:]
a=s.index('def test_cifar10_crafted_file_runs_nothing')
s=s[:a]+'''def test_crafted_cifar10_file_is_not_unpickled(tmp_path: Path) -> None:
    class Crafted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(Crafted()))
    with pytest.raises(DataError, match=rf"{path} is truncated or damaged \\(its MD5 sum is not CIFAR-10's\\)"):
        read_cifar10_batch(path)
    assert not (tmp_path / "executed").exists()
'''
a=s.index('def test_cifar10_truncated'); b=s.index('def test_crafted_cifar10_file')
s=s[:a]+s[b:]
s=s.replace('import tracemalloc\n','')
for a,b in {
'def test_idx_plain_and_packed(':'def test_read_idx_returns_the_array_of_plain_and_packed_files(',
'def test_truncated_idx_names_the_file(':'def test_error_of_a_truncated_idx_file_names_the_file(',
'def test_not_an_idx_file(':'def test_other_files_are_not_idx_files(',
'def test_empty_idx_is_damaged(':'def test_idx_file_without_values_is_damaged(',
'def test_packed_file_that_is_not_gzip(':'def test_gz_file_in_another_format_cannot_be_read(',
'def test_unreadable_path(':'def test_folder_in_place_of_a_file_cannot_be_read(',
'def test_idx_pair(':'def test_read_idx_pair_returns_images_and_labels(',
'def test_idx_pair_of_different_lengths(':'def test_idx_pair_of_different_lengths_raises_data_error(',
'def test_idx_label_out_of_range(':'def test_idx_label_out_of_range_raises_data_error(',
'def test_mnist_equals_torchvisions(':'def test_mnist_equals_the_one_of_torchvision(',
'    theirs = MNIST(':'    expected = MNIST(','theirs.data':'expected.data','theirs.targets':'expected.targets',
'def test_digits_equal_scikit_learns(':'def test_digits_equal_those_of_scikit_learn(',
'def test_digits_where_scikit_learn_keeps_them_elsewhere(':'def test_digits_are_loaded_by_scikit_learn_if_their_file_has_moved(',
'def test_digits_damaged(':'def test_damaged_digits_raise_data_error(',
'def test_digits_without_scikit_learn(':'def test_digits_without_scikit_learn_raise_data_error(',
'def test_cifar10_batch(':'def test_read_cifar10_batch_returns_images_and_labels(',
'# the flag before the pixels, which then lie column by column':'# the flag precedes the pixels, which are then in column order',
'def test_cifar10_checksums_are_torchvisions(':'def test_cifar10_checksums_equal_those_of_torchvision(',
}.items():
    assert a in s,a
    s=s.replace(a,b)
p.write_text(s)
p=T/'conftest.py'; s=p.read_text()
s=s.replace('"""A batch as Python 2 and the NumPy of 2009 pickled CIFAR-10\'s: byte strings, protocol 2."""','"""Return a function that pickles a batch as Python 2 and NumPy of 2009 did: byte strings, protocol 2."""')
p.write_text(s)
p=pathlib.Path('tests/multiproc/test_ddp.py'); s=p.read_text()
s=s.replace('in_channels=1, image_size=8, mean=(0.5,), std=(0.25,))','in_channels=1, image_size=8)')
p.write_text(s)
