//! A dictionary's bytes: read from a file, or trained from pages. What a codec makes of them is in the codec's file.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::Name;
use super::contexts::NoMemory;
use crate::page::{PAGE_SIZE, Page};

/// Why an algorithm that was read well cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The path, from the root, cannot be written down with a disk's memory: too long, not UTF-8, or control characters.
    #[error("dictionary '{}': allowed is a path of {PATH_BYTES_MAX} bytes of UTF-8 without control characters", .0.display())]
    Path(PathBuf),
    /// The file does not open, or does not let itself be read.
    #[error("cannot read dictionary '{}'", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// It is a directory, a FIFO, a device or a socket.
    #[error("dictionary '{}' is no regular file, but a {}", .0.display(), .1)]
    NotAFile(PathBuf, &'static str),
    /// It holds nothing.
    #[error("dictionary '{}' is empty", .0.display())]
    Empty(PathBuf),
    /// It is larger than the codec can use.
    #[error("dictionary '{}' has more than the {max} bytes that {algorithm} can use", path.display())]
    TooLarge {
        /// The dictionary.
        path: PathBuf,
        /// The codec.
        algorithm: &'static str,
        /// What the codec can use.
        max: usize,
    },
    /// It begins as one of zstd's and goes on differently.
    #[error("dictionary '{}' is damaged: zstd cannot use it", .0.display())]
    Damaged(PathBuf),
    /// The host does not give the memory.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// Four of them fit into the head of a disk's memory.
const PATH_BYTES_MAX: usize = 768;

/// The path from the root, so that it means the same to the process that takes a disk over.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, LoadError> {
    let absolute = std::path::absolute(path).map_err(|error| LoadError::Read(path.into(), error))?;
    match absolute.to_str() {
        Some(text) if text.len() <= PATH_BYTES_MAX && !text.contains(char::is_control) => Ok(absolute),
        _ => Err(LoadError::Path(absolute)),
    }
}

/// Reads the whole file at `path`, which may be anything: never waits for a FIFO's writer, never reads more than it must
/// to see that there is too much.
pub(super) fn read(path: &Path, name: Name) -> Result<Vec<u8>, LoadError> {
    let failed = |error: io::Error| LoadError::Read(path.into(), error);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?.st_mode);
    if kind != FileType::RegularFile {
        return Err(LoadError::NotAFile(path.into(), kind_name(kind)));
    }
    let max = name.dictionary_bytes_max().unwrap_or(0);
    let mut bytes = vec![];
    let read = File::from(file).take(max as u64 + 1).read_to_end(&mut bytes);
    match read.map_err(failed)? {
        0 => Err(LoadError::Empty(path.into())),
        len if len > max => Err(LoadError::TooLarge {
            path: path.into(),
            algorithm: name.text(),
            max,
        }),
        _ => Ok(bytes),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::Fifo => "FIFO",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        _ => "socket or something else",
    }
}

/// The smallest dictionary that zstd's trainer makes, `ZDICT_DICTSIZE_MIN`.
pub const DICTIONARY_BYTES_MIN: usize = 256;
/// The most that is worth training for pages of 4 KiB, and that every codec can use.
pub const DICTIONARY_BYTES_MAX: usize = 64 << 10;

/// Why no dictionary came of some pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrainError {
    /// The size asked for is outside the range.
    #[error("a dictionary of {0} bytes: allowed is {DICTIONARY_BYTES_MIN} to {DICTIONARY_BYTES_MAX}")]
    Size(usize),
    /// There are hardly any pages, or they have nothing in common.
    #[error("{0} pages that are not same-filled are too few, or have too little in common, for a dictionary")]
    TooFew(usize),
}

/// Makes a dictionary of at most `dictionary_bytes` from pages like those that it is for. Some hundred times as many bytes
/// of pages as the dictionary shall have are a good measure. Takes seconds. Same-filled pages are left out: no codec ever
/// sees them.
pub fn train<'a>(pages: impl IntoIterator<Item = &'a Page>, dictionary_bytes: usize) -> Result<Vec<u8>, TrainError> {
    if !(DICTIONARY_BYTES_MIN..=DICTIONARY_BYTES_MAX).contains(&dictionary_bytes) {
        return Err(TrainError::Size(dictionary_bytes));
    }
    let mut samples = vec![];
    for page in pages.into_iter().filter(|page| page.same_filled().is_none()) {
        samples.extend_from_slice(&page[..]);
    }
    let count = samples.len() / PAGE_SIZE;
    // libzstd counts them in 32 bits; and with none it does not get as far as an error.
    if count == 0 || u32::try_from(count).is_err() {
        return Err(TrainError::TooFew(count));
    }
    let mut dictionary = vec![0; dictionary_bytes];
    let trained = zstd_safe::train_from_buffer(&mut dictionary[..], &samples, &vec![PAGE_SIZE; count]);
    dictionary.truncate(trained.map_err(|_| TrainError::TooFew(count))?);
    Ok(dictionary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Algorithm;

    fn load(text: &str, path: &Path) -> String {
        let text = format!("{text}(dict={})", path.display());
        let error = text.parse::<Algorithm>().unwrap().load().unwrap_err();
        match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn a_file_that_is_no_dictionary_is_refused_at_once_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dictionary");
        let told = |what: &str| format!("dictionary '{}' {what}", path.display());
        let missing = load("zstd", &path);
        assert!(missing.starts_with(&format!("cannot read {}", told(""))[..20]) && missing.contains("No such file"));
        assert!(missing.contains(path.to_str().unwrap()));

        std::fs::write(&path, "").unwrap();
        assert_eq!(load("lz4", &path), told("is empty"));
        for (text, max) in [("lz4", 65_536), ("lz4hc", 65_536), ("zstd", 1_048_576)] {
            std::fs::write(&path, vec![7; max + 1]).unwrap();
            assert_eq!(
                load(text, &path),
                told(&format!("has more than the {max} bytes that {text} can use"))
            );
            std::fs::write(&path, vec![7; max]).unwrap();
            let fits: Algorithm = format!("{text}(dict={})", path.display()).parse().unwrap();
            assert!(fits.load().is_ok());
        }
        std::fs::write(&path, [0x37, 0xa4, 0x30, 0xec, 1, 0, 0, 0, 9, 9, 9, 9]).unwrap();
        assert_eq!(load("zstd", &path), told("is damaged: zstd cannot use it"));

        let directory = directory.path();
        let long = directory.join("x".repeat(PATH_BYTES_MAX));
        assert!(load("zstd", &long).ends_with("allowed is a path of 768 bytes of UTF-8 without control characters"));
        assert!(load("zstd", directory).ends_with("is no regular file, but a directory"));
        let fifo = directory.join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(load("zstd", &fifo).ends_with("is no regular file, but a FIFO"));
        assert!(load("zstd", Path::new("/dev/zero")).ends_with("is no regular file, but a device"));
    }

    #[test]
    fn training_needs_pages_and_a_size_in_range() {
        let page = Page::zeroed();
        assert_eq!(train([&*page; 100], 4096), Err(TrainError::TooFew(0)));
        assert_eq!(train([], 4096), Err(TrainError::TooFew(0)));
        assert_eq!(train([&*page], 255), Err(TrainError::Size(255)));
        assert_eq!(train([&*page], 65_537), Err(TrainError::Size(65_537)));
        let mut other = Page::zeroed();
        other[5] = 1;
        assert_eq!(train([&*other], 4096), Err(TrainError::TooFew(1)));
    }
}
