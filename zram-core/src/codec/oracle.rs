//! Tests against implementations that nobody here wrote or linked: the host's liblz4, libzstd and zlib (Debian's liblz4-1,
//! libzstd1, zlib1g; `scripts/install-deps test`). They decode what we encode, and we decode what they encode.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::{Library, Symbol};

use super::tests::text_page;
use super::*;
use crate::page::Page;

/// The sonames of these interfaces have not changed for a decade.
fn library(name: &str) -> Library {
    // SAFETY: these libraries do nothing when they are loaded.
    unsafe { Library::new(name) }.unwrap_or_else(|error| panic!("{name}: {error} (scripts/install-deps test)"))
}

/// # Safety
/// `F` is the type of the function that the library has under this name.
unsafe fn function<'a, F>(library: &'a Library, name: &str) -> Symbol<'a, F> {
    // SAFETY: the caller's promise.
    unsafe { library.get(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Pages that compress, of many kinds: text, numbers, zeroes with something in them, half noise.
fn pages() -> Vec<Box<Page>> {
    let mut random = 1_u64;
    let mut noise = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as u8
    };
    let mut pages: Vec<_> = (0..20).map(text_page).collect();
    for kind in 0..20 {
        let mut page = Page::zeroed();
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = match kind % 4 {
                0 => (at * (kind + 1) / 7) as u8,
                1 if at % 64 < kind => noise(),
                2 if at < kind * 100 => noise(),
                3 => noise() & 3,
                _ => 0,
            };
        }
        pages.push(page);
    }
    pages
}

fn dictionary() -> Vec<u8> {
    let pages: Vec<_> = (100..400).map(text_page).collect();
    train(pages.iter().map(|page| &**page), 8192).unwrap()
}

fn codecs(text: &str, dictionary: Option<&[u8]>) -> Codecs {
    let algorithm = text.parse::<Algorithm>().unwrap().load().unwrap();
    let algorithm = algorithm.with_dictionary(dictionary).unwrap();
    Codecs::new(
        algorithm,
        Default::default(),
        DecompressionContexts::new(1.try_into().unwrap()),
    )
    .unwrap()
}

/// `they_decode` what we encode with each algorithm, and we decode what `they_encode`.
fn cross(
    algorithms: &[&str],
    dictionary: Option<&[u8]>,
    mut they_decode: impl FnMut(&str, &[u8], &mut Page) -> bool,
    mut they_encode: impl FnMut(&str, &Page) -> Vec<u8>,
) {
    for text in algorithms {
        let codecs = codecs(text, dictionary);
        let mut stream = codecs.stream().unwrap();
        for (number, page) in pages().iter().enumerate() {
            let mut back = Page::zeroed();
            assert!(
                they_decode(text, stream.compress(page), &mut back),
                "{text}, page {number}"
            );
            assert!(back[..] == page[..], "{text}, page {number}");
            let content = they_encode(text, page);
            codecs.decompress(0, 0, &content, &mut back).unwrap();
            assert!(back[..] == page[..], "{text}, page {number}, theirs");
        }
    }
}

#[test]
fn liblz4_and_ours_read_each_other() {
    type Compress = unsafe extern "C" fn(*const u8, *mut u8, c_int, c_int, c_int) -> c_int;
    type Decompress = unsafe extern "C" fn(*const u8, *mut u8, c_int, c_int) -> c_int;
    let library = library("liblz4.so.1");
    // SAFETY: lz4.h and lz4hc.h.
    let (fast, high, decompress) = unsafe {
        (
            function::<Compress>(&library, "LZ4_compress_fast"),
            function::<Compress>(&library, "LZ4_compress_HC"),
            function::<Decompress>(&library, "LZ4_decompress_safe"),
        )
    };
    let they_decode = |_: &str, content: &[u8], page: &mut Page| {
        // SAFETY: content and a page, of these lengths.
        let len = unsafe {
            decompress(
                content.as_ptr(),
                page.as_mut_ptr(),
                content.len() as c_int,
                PAGE_SIZE as c_int,
            )
        };
        len == PAGE_SIZE as c_int
    };
    let they_encode = |text: &str, page: &Page| {
        let mut output = vec![0; OUTPUT_SIZE];
        let compress = if text.starts_with("lz4hc") { &high } else { &fast };
        // SAFETY: a page and an output, of these lengths.
        let len = unsafe {
            compress(
                page.as_ptr(),
                output.as_mut_ptr(),
                PAGE_SIZE as c_int,
                OUTPUT_SIZE as c_int,
                9,
            )
        };
        output.truncate(len as usize);
        output
    };
    cross(
        &["lz4", "lz4(level=20)", "lz4hc(level=1)", "lz4hc", "lz4hc(level=12)"],
        None,
        they_decode,
        they_encode,
    );
}

#[test]
fn liblz4_and_ours_read_each_other_with_a_dictionary() {
    type Decompress = unsafe extern "C" fn(*const u8, *mut u8, c_int, c_int, *const u8, c_int) -> c_int;
    type Create = unsafe extern "C" fn() -> *mut c_void;
    type Load = unsafe extern "C" fn(*mut c_void, *const u8, c_int) -> c_int;
    type Free = unsafe extern "C" fn(*mut c_void) -> c_int;
    type Fast = unsafe extern "C" fn(*mut c_void, *const u8, *mut u8, c_int, c_int, c_int) -> c_int;
    type High = unsafe extern "C" fn(*mut c_void, *const u8, *mut u8, c_int, c_int) -> c_int;
    let library = library("liblz4.so.1");
    let dictionary = dictionary();
    let dictionary_len = dictionary.len() as c_int;
    // SAFETY: lz4.h.
    let decompress = unsafe { function::<Decompress>(&library, "LZ4_decompress_safe_usingDict") };
    let they_decode = |_: &str, content: &[u8], page: &mut Page| {
        // SAFETY: content, a page and a dictionary, of these lengths.
        let len = unsafe {
            decompress(
                content.as_ptr(),
                page.as_mut_ptr(),
                content.len() as c_int,
                PAGE_SIZE as c_int,
                dictionary.as_ptr(),
                dictionary_len,
            )
        };
        len == PAGE_SIZE as c_int
    };
    let they_encode = |text: &str, page: &Page| {
        let mut output = vec![0; OUTPUT_SIZE];
        let (from, to) = (page.as_ptr(), output.as_mut_ptr());
        let (from_len, to_len) = (PAGE_SIZE as c_int, OUTPUT_SIZE as c_int);
        // SAFETY: lz4.h and lz4hc.h; a stream is made, given the dictionary, used for one page, and freed.
        let len = unsafe {
            if text.starts_with("lz4hc") {
                let stream = function::<Create>(&library, "LZ4_createStreamHC")();
                function::<Load>(&library, "LZ4_loadDictHC")(stream, dictionary.as_ptr(), dictionary_len);
                let len = function::<High>(&library, "LZ4_compress_HC_continue")(stream, from, to, from_len, to_len);
                function::<Free>(&library, "LZ4_freeStreamHC")(stream);
                len
            } else {
                let stream = function::<Create>(&library, "LZ4_createStream")();
                function::<Load>(&library, "LZ4_loadDict")(stream, dictionary.as_ptr(), dictionary_len);
                let len =
                    function::<Fast>(&library, "LZ4_compress_fast_continue")(stream, from, to, from_len, to_len, 1);
                function::<Free>(&library, "LZ4_freeStream")(stream);
                len
            }
        };
        output.truncate(len as usize);
        output
    };
    cross(&["lz4", "lz4hc"], Some(&dictionary), they_decode, they_encode);
}

/// Of libzstd, one context for each direction, set to frames without a magic number.
struct Zstd {
    library: Library,
    compression: *mut c_void,
    decompression: *mut c_void,
}

impl Zstd {
    fn new(dictionary: Option<&[u8]>) -> Zstd {
        type Create = unsafe extern "C" fn() -> *mut c_void;
        type Set = unsafe extern "C" fn(*mut c_void, c_int, c_int) -> usize;
        type Load = unsafe extern "C" fn(*mut c_void, *const u8, usize) -> usize;
        /// `ZSTD_c_format`, `ZSTD_d_format`, `ZSTD_f_zstd1_magicless`.
        const FORMATS_AND_MAGICLESS: (c_int, c_int, c_int) = (10, 1000, 1);
        let (compression_format, decompression_format, magicless) = FORMATS_AND_MAGICLESS;
        let library = library("libzstd.so.1");
        // SAFETY: zstd.h. The contexts live as long as the library, here.
        unsafe {
            let compression = function::<Create>(&library, "ZSTD_createCCtx")();
            let decompression = function::<Create>(&library, "ZSTD_createDCtx")();
            let set = function::<Set>(&library, "ZSTD_CCtx_setParameter")(compression, compression_format, magicless);
            assert_eq!(set, magicless as usize, "it tells what it set");
            let set =
                function::<Set>(&library, "ZSTD_DCtx_setParameter")(decompression, decompression_format, magicless);
            assert_eq!(set, 0);
            if let Some(bytes) = dictionary {
                let load = |name, context| function::<Load>(&library, name)(context, bytes.as_ptr(), bytes.len());
                assert_eq!(load("ZSTD_CCtx_loadDictionary", compression), 0);
                assert_eq!(load("ZSTD_DCtx_loadDictionary", decompression), 0);
            }
            Zstd {
                library,
                compression,
                decompression,
            }
        }
    }

    fn call(&self, name: &str, context: *mut c_void, from: &[u8], to: &mut [u8]) -> usize {
        type Call = unsafe extern "C" fn(*mut c_void, *mut u8, usize, *const u8, usize) -> usize;
        // SAFETY: zstd.h; a context of this direction, and buffers of these lengths.
        unsafe { function::<Call>(&self.library, name)(context, to.as_mut_ptr(), to.len(), from.as_ptr(), from.len()) }
    }
}

impl Drop for Zstd {
    fn drop(&mut self) {
        type Free = unsafe extern "C" fn(*mut c_void) -> usize;
        // SAFETY: zstd.h; nobody uses the contexts after this.
        unsafe {
            function::<Free>(&self.library, "ZSTD_freeCCtx")(self.compression);
            function::<Free>(&self.library, "ZSTD_freeDCtx")(self.decompression);
        }
    }
}

#[test]
fn libzstd_and_ours_read_each_other() {
    let trained = dictionary();
    for dictionary in [None, Some(&trained[..])] {
        let theirs = Zstd::new(dictionary);
        let they_decode = |_: &str, content: &[u8], page: &mut Page| {
            let frame = [&zstd::headers(content.len())[..], content].concat();
            theirs.call("ZSTD_decompressDCtx", theirs.decompression, &frame, &mut page[..]) == PAGE_SIZE
        };
        let they_encode = |_: &str, page: &Page| {
            let mut frame = vec![0; OUTPUT_SIZE];
            let len = theirs.call("ZSTD_compress2", theirs.compression, &page[..], &mut frame);
            let content = zstd::block_content(&frame[..len], false).expect("one block, compressed");
            frame[content].to_vec()
        };
        cross(
            &[
                "zstd(level=-5)",
                "zstd",
                "zstd(level=3)",
                "zstd(level=12)",
                "zstd(level=22)",
            ],
            dictionary,
            they_decode,
            they_encode,
        );
    }
}

/// zlib's stream, as zlib.h has it on Linux: the fields that are used, and room for the others.
#[repr(C)]
struct ZStream {
    next_in: *const u8,
    avail_in: c_uint,
    total_in: u64,
    next_out: *mut u8,
    avail_out: c_uint,
    total_out: u64,
    others: [*mut c_void; 8],
}

#[test]
fn zlib_and_ours_read_each_other() {
    type DeflateInit =
        unsafe extern "C" fn(*mut ZStream, c_int, c_int, c_int, c_int, c_int, *const c_char, c_int) -> c_int;
    type InflateInit = unsafe extern "C" fn(*mut ZStream, c_int, *const c_char, c_int) -> c_int;
    type Run = unsafe extern "C" fn(*mut ZStream, c_int) -> c_int;
    type End = unsafe extern "C" fn(*mut ZStream) -> c_int;
    const FINISH: c_int = 4;
    const STREAM_END: c_int = 1;
    let library = library("libz.so.1");
    let stream = |from: &[u8], to: &mut [u8]| ZStream {
        next_in: from.as_ptr(),
        avail_in: from.len() as c_uint,
        total_in: 0,
        next_out: to.as_mut_ptr(),
        avail_out: to.len() as c_uint,
        total_out: 0,
        others: [null_mut(); 8],
    };
    let stream_bytes = size_of::<ZStream>() as c_int;
    for bits in [-9, -11, -15, 9, 12, 15] {
        let they_decode = |_: &str, content: &[u8], page: &mut Page| {
            let mut stream = stream(content, &mut page[..]);
            // SAFETY: zlib.h; a stream for one page, ended. Its window is as small as the parameter says.
            unsafe {
                let version = c"1.2.11".as_ptr();
                let init = function::<InflateInit>(&library, "inflateInit2_")(&mut stream, bits, version, stream_bytes);
                assert_eq!(init, 0);
                let result = function::<Run>(&library, "inflate")(&mut stream, FINISH);
                function::<End>(&library, "inflateEnd")(&mut stream);
                result == STREAM_END && stream.total_out == PAGE_SIZE as u64 && stream.avail_in == 0
            }
        };
        let they_encode = |_: &str, page: &Page| {
            let mut output = vec![0; OUTPUT_SIZE];
            let mut stream = stream(&page[..], &mut output);
            // SAFETY: zlib.h; a stream for one page, ended.
            let result = unsafe {
                let version = c"1.2.11".as_ptr();
                let init = function::<DeflateInit>(&library, "deflateInit2_");
                assert_eq!(init(&mut stream, 6, 8, bits, 8, 0, version, stream_bytes), 0);
                let result = function::<Run>(&library, "deflate")(&mut stream, FINISH);
                function::<End>(&library, "deflateEnd")(&mut stream);
                result
            };
            assert_eq!(result, STREAM_END);
            output.truncate(stream.total_out as usize);
            output
        };
        let algorithms = [0, 1, 6, 9].map(|level| format!("deflate(level={level},winbits={bits})"));
        let algorithms = algorithms.each_ref().map(String::as_str);
        cross(&algorithms, None, they_decode, they_encode);
    }
}
