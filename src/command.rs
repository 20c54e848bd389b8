//! What a request on the control socket is answered: one line in, one line out. A request that changes something is
//! checked whole before anything changes. Nothing here waits for I/O; `compact`, `recompress` and
//! `train-dict` work on their client's thread, for as long as it takes.

use std::sync::TryLockError;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use zram_core::{
    Algorithm, ArenaReport, Compacted, DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, HeapReport, HoleClass, IDLE_AGE_MAX,
    IdleMark, PAGE_SIZE, RecompressError, RecompressOptions, RecompressType,
};
use zram_vhost::{Notice, Resized};

use crate::disk::Disk;
use crate::protocol::{
    Arena, CompactReport, DictionaryReport, ErrorBody, Heap, Holes, IdleReport, IoStat, MmStat, PROTOCOL_VERSION,
    RecompressReport, Refusal, Request, ResizeReport, Version,
};
use crate::size::human_long;
use crate::{settings, training};

/// The answer to one line.
pub fn answer(line: &[u8], disk: &Disk) -> Vec<u8> {
    parse(line, disk)
        .and_then(|request| respond(&request, disk))
        .unwrap_or_else(|error| reply(&Refusal { error }))
}

/// The answer to what cannot be answered.
pub fn refusal(kind: &str, message: &str) -> Vec<u8> {
    reply(&Refusal {
        error: error(kind, message),
    })
}

fn parse(line: &[u8], disk: &Disk) -> Result<Request, ErrorBody> {
    let request: Request = serde_json::from_slice(line).map_err(|cause| {
        let wanted = r#"{"command":"NAME"}, with "disk" and "values" where they belong"#;
        error("bad-request", &format!("not {wanted}: {cause}"))
    })?;
    if let Some(name) = request.disk.as_deref().filter(|&name| name != disk.name()) {
        return Err(error(
            "unknown-disk",
            &format!("{name:?} is not here; the disk here is {:?}", disk.name()),
        ));
    }
    let takes_values = ["set", "resize", "idle", "recompress"].contains(&request.command.as_str());
    // All that train-dict takes has a default.
    if request.values.is_some() != takes_values && request.command != "train-dict" {
        return Err(error(
            "bad-request",
            "\"values\" go with the commands set, resize, idle, recompress and train-dict, and only with them",
        ));
    }
    Ok(request)
}

fn respond(request: &Request, disk: &Disk) -> Result<Vec<u8>, ErrorBody> {
    Ok(match request.command.as_str() {
        "version" => reply(&Version {
            version: env!("CARGO_PKG_VERSION").into(),
            protocol: PROTOCOL_VERSION,
        }),
        "stats" => reply(&disk.stats()),
        "mm-stat" => reply(&MmStat {
            mm_stat: disk.zram().stats().mm_stat(),
        }),
        "io-stat" => reply(&IoStat {
            io_stat: disk.zram().stats().io_stat(),
        }),
        "arena" => reply(&arena(disk)),
        "compact" => reply(&compact(disk)),
        "set" => reply(&settings::set(disk, request.values.as_ref())?),
        "resize" => reply(&resize(disk, request.values.iter().flatten())?),
        "idle" => reply(&idle(disk, request.values.iter().flatten())?),
        "recompress" => reply(&recompress(disk, request.values.iter().flatten())?),
        "train-dict" => reply(&train_dictionary(disk, request.values.iter().flatten())?),
        other => {
            let known = "version, stats, mm-stat, io-stat, arena, compact, set, resize, idle, recompress, train-dict";
            return Err(error("unknown-command", &format!("{other:?} is none of {known}")));
        }
    })
}

type Values<'a> = std::iter::Flatten<std::option::Iter<'a, serde_json::Map<String, Value>>>;

fn wrong_value(key: &str, value: &Value, allowed: &str) -> ErrorBody {
    error("bad-value", &format!("{key} {value}: {allowed}"))
}

/// Changes the size: `size` in bytes.
fn resize(disk: &Disk, values: Values<'_>) -> Result<ResizeReport, ErrorBody> {
    let mut size = None;
    for (key, value) in values {
        if key != "size" {
            return Err(error(
                "unknown-key",
                &format!("{key:?} is no value of resize; it takes size"),
            ));
        }
        let bytes = value.as_u64().filter(|&bytes| bytes != 0);
        size = Some(bytes.ok_or_else(|| wrong_value(key, value, "allowed is a number of bytes, from 1"))?);
    }
    let size = size.ok_or_else(|| error("bad-value", "resize takes size, in bytes"))?;
    let size = size.checked_next_multiple_of(PAGE_SIZE as u64).unwrap_or(size);
    let Resized { bytes_before, notice } = disk
        .resize(size)
        .map_err(|cause| error("not-resized", &format!("{}: {cause}", human_long(size))))?;
    if notice.is_some() {
        tracing::info!(
            disk = disk.name(),
            "the size is {size} bytes now, it was {bytes_before}"
        );
    }
    Ok(ResizeReport {
        name: disk.name().into(),
        disksize_before: bytes_before,
        disksize: size,
        notice: match notice {
            None => "unchanged",
            Some(Notice::Told) => "told",
            Some(Notice::NoFrontend) => "no-frontend",
            Some(Notice::NoChannel) => "no-channel",
            Some(Notice::Unread) => "unread",
        }
        .into(),
    })
}

/// Marks pages as idle: `age` in seconds, or null for all.
fn idle(disk: &Disk, values: Values<'_>) -> Result<IdleReport, ErrorBody> {
    let mut mark = None;
    for (key, value) in values {
        mark = Some(match (key.as_str(), value) {
            ("age", Value::Null) => IdleMark::All,
            ("age", value) => match value.as_u64() {
                Some(seconds) if seconds <= IDLE_AGE_MAX.as_secs() => IdleMark::Age(Duration::from_secs(seconds)),
                _ => {
                    let allowed = format!(
                        "allowed is 0 to {} seconds, or null for all pages",
                        IDLE_AGE_MAX.as_secs()
                    );
                    return Err(wrong_value(key, value, &allowed));
                }
            },
            _ => {
                return Err(error(
                    "unknown-key",
                    &format!("{key:?} is no value of idle; it takes age"),
                ));
            }
        });
    }
    let mark = mark.ok_or_else(|| error("bad-value", "idle takes age: seconds, or null for all pages"))?;
    Ok(IdleReport {
        name: disk.name().into(),
        pages_marked: disk.zram().mark_idle(mark),
    })
}

/// Compresses pages again, on this thread.
fn recompress(disk: &Disk, values: Values<'_>) -> Result<RecompressReport, ErrorBody> {
    let mut options = RecompressOptions::default();
    let mut by_name = None;
    for (key, value) in values {
        let number = |allowed: &str| value.as_u64().ok_or_else(|| wrong_value(key, value, allowed));
        match key.as_str() {
            "type" => {
                options.kind = match value.as_str() {
                    Some("all") => RecompressType::All,
                    Some("idle") => RecompressType::Idle,
                    Some("huge") => RecompressType::Huge,
                    Some("huge_idle") => RecompressType::HugeIdle,
                    _ => return Err(wrong_value(key, value, "allowed is all, idle, huge or huge_idle")),
                }
            }
            "threshold" => options.threshold = Some(number("allowed is 1 to 4095 bytes")? as usize),
            "max-pages" => options.max_pages = Some(number("allowed is a number of pages")?),
            "priority" => options.priority = Some(number("allowed is 1 to 3")? as usize),
            "algorithm" => by_name = Some(priority_of(disk, value)?),
            _ => {
                let known = "type, threshold, max-pages, priority and algorithm";
                return Err(error(
                    "unknown-key",
                    &format!("{key:?} is no value of recompress; it takes {known}"),
                ));
            }
        }
    }
    if by_name.is_some() && options.priority.is_some() {
        return Err(error(
            "bad-value",
            "priority and algorithm say the same: give one of them",
        ));
    }
    options.priority = options.priority.or(by_name);
    let since = Instant::now();
    let done = disk.zram().recompress(&options).map_err(|cause| {
        let kind = if cause == RecompressError::Busy {
            "busy"
        } else {
            "bad-value"
        };
        error(kind, &cause.to_string())
    })?;
    Ok(RecompressReport {
        name: disk.name().into(),
        pages_tried: done.pages_tried,
        pages_recompressed: done.pages_recompressed,
        pages_incompressible: done.pages_incompressible,
        bytes_gained: done.bytes_gained,
        limit_reached: done.is_limit_reached,
        milliseconds: since.elapsed().as_millis() as u64,
    })
}

/// When nobody says how large.
const DICTIONARY_BYTES: usize = 16 << 10;

/// Makes a dictionary from a sample of the disk's pages.
fn train_dictionary(disk: &Disk, values: Values<'_>) -> Result<DictionaryReport, ErrorBody> {
    let mut size = DICTIONARY_BYTES;
    for (key, value) in values {
        let known = || {
            error(
                "unknown-key",
                &format!("{key:?} is no value of train-dict; it takes size"),
            )
        };
        let given = value.as_u64().and_then(|bytes| usize::try_from(bytes).ok());
        let fits = given.filter(|bytes| (DICTIONARY_BYTES_MIN..=DICTIONARY_BYTES_MAX).contains(bytes));
        size = match key.as_str() {
            "size" => fits.ok_or_else(|| wrong_value(key, value, "allowed is 256 to 65536 bytes"))?,
            _ => return Err(known()),
        };
    }
    let _one_at_a_time = match disk.training.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(error("busy", "a dictionary is being made already")),
    };
    let zram = disk.zram();
    let pages = zram
        .sample_pages(training::sample_pages(size))
        .map_err(|cause| error("busy", &cause.to_string()))?;
    training::dictionary(disk.name(), &pages, zram.algorithm(), size)
        .map_err(|cause| error("no-dictionary", &cause.to_string()))
}

/// The priority of the one algorithm that is meant.
fn priority_of(disk: &Disk, value: &Value) -> Result<usize, ErrorBody> {
    let name = value.as_str().unwrap_or_default();
    let mut found = disk
        .zram()
        .recompress_algorithms()
        .filter(|(_, algorithm)| is_called(algorithm, name));
    match (found.next(), found.next()) {
        (Some((priority, _)), None) => Ok(priority),
        (Some((one, _)), Some((other, _))) => {
            let several = format!("it may be that of priority {one} or {other}: say priority");
            Err(wrong_value("algorithm", value, &several))
        }
        (None, _) => Err(wrong_value("algorithm", value, "the disk has no such algorithm to use")),
    }
}

/// By the whole text, or by the codec's name alone.
fn is_called(algorithm: &Algorithm, name: &str) -> bool {
    let text = algorithm.to_string();
    text == name || text.split('(').next() == Some(name)
}

fn compact(disk: &Disk) -> CompactReport {
    let zram = disk.zram();
    let mem_used_before = zram.stats().mem_used_total;
    let Compacted {
        objects_moved,
        pages_compacted,
    } = zram.compact();
    CompactReport {
        name: disk.name().into(),
        objects_moved,
        pages_compacted,
        mem_used_before,
        mem_used_total: zram.stats().mem_used_total,
    }
}

fn arena(disk: &Disk) -> Arena {
    let ArenaReport {
        segment_bytes,
        segments_in_use,
        segments_empty,
        live_shares,
        holes,
        heaps,
        busy_heaps,
    } = disk.zram().arena_report();
    let holes = holes.into_iter().map(
        |HoleClass {
             bytes_min,
             count,
             bytes,
         }| Holes {
            bytes_min,
            count,
            bytes,
        },
    );
    let heaps = heaps.into_iter().map(
        |HeapReport {
             heap,
             segments,
             live_bytes,
             hole_bytes,
         }| Heap {
            heap: heap as u64,
            segments,
            live_bytes,
            hole_bytes,
        },
    );
    Arena {
        name: disk.name().into(),
        segment_bytes,
        segments_in_use,
        segments_empty,
        live_shares: live_shares.into(),
        holes: holes.collect(),
        heaps: heaps.collect(),
        busy_heaps,
    }
}

pub(crate) fn error(kind: &str, message: &str) -> ErrorBody {
    ErrorBody {
        kind: kind.into(),
        message: message.into(),
    }
}

fn reply(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages are plain structs of numbers and strings");
    line.push(b'\n');
    line
}
