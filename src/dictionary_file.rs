//! Files of `vzramctl train-dict`: a file of pages to read, and the dictionary that is written, whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use zram_core::{Algorithm, PAGE_SIZE, Page};

use crate::protocol::DictionaryReport;
use crate::training;

/// A dictionary from a file of pages.
pub fn train(path: &Path, algorithm: &Algorithm, dictionary_bytes: usize) -> Result<DictionaryReport, String> {
    let told = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let pages = read(path, training::sample_pages(dictionary_bytes)).map_err(|error| told(&error))?;
    let name = path.display().to_string();
    training::dictionary(&name, &pages, algorithm, dictionary_bytes).map_err(|error| told(&error))
}

/// Up to `count` pages that are not same-filled, spread over the file.
fn read(path: &Path, count: usize) -> io::Result<Vec<Box<Page>>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let len = metadata.len();
    if !metadata.is_file() || len == 0 || !len.is_multiple_of(PAGE_SIZE as u64) {
        return Err(io::Error::other("it is no file of pages of 4096 bytes"));
    }
    let of_file = len / PAGE_SIZE as u64;
    let stride = of_file.div_ceil(count as u64);
    let mut pages = Vec::new();
    // Where many are same-filled, their neighbours stand in for them.
    for number in (0..stride).flat_map(|first| (first..of_file).step_by(stride as usize)) {
        if pages.len() == count {
            break;
        }
        let mut page = Page::zeroed();
        file.read_exact_at(&mut page[..], number * PAGE_SIZE as u64)?;
        if page.same_filled().is_none() {
            pages.push(page);
        }
    }
    Ok(pages)
}

/// Whether a dictionary can go to `path`, as far as can be seen before there is one.
pub fn check(path: &Path, force: bool) -> Result<(), String> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(format!("{} is there, and no regular file", path.display())),
        Ok(_) if !force => Err(there(path)),
        _ => Ok(()),
    }
}

/// Writes a dictionary beside `path` first and then puts it there, so that nobody ever finds half of it.
pub fn write(path: &Path, bytes: &[u8], force: bool) -> Result<(), String> {
    check(path, force)?;
    let beside = beside(path);
    let written = put(path, &beside, bytes, force);
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => there(path),
        _ => format!("{} cannot be written: {error}", path.display()),
    })
}

fn put(path: &Path, beside: &Path, bytes: &[u8], force: bool) -> io::Result<()> {
    let mut file = File::create_new(beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    let flags = if force {
        RenameFlags::empty()
    } else {
        RenameFlags::NOREPLACE
    };
    Ok(renameat_with(CWD, beside, CWD, path, flags)?)
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    name.into()
}

fn there(path: &Path) -> String {
    format!("{} is there already; --force replaces it", path.display())
}
