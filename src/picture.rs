//! The arena of a disk as a picture of text, at most 80 columns wide: how full segments are, which holes there are, and
//! whose they are. And what its contexts take.

use std::fmt::Write;

use crate::protocol::{Arena, ContextBytes, DiskStats};
use crate::size::human;

/// The longest bar. What stands before it takes 28 columns at most.
const BAR_MAX: u64 = 40;
/// How many heaps have a line of their own, those with the most holes.
const HEAPS_MAX: usize = 16;

/// The picture.
pub fn arena(arena: &Arena) -> String {
    let live: u64 = arena.heaps.iter().map(|heap| heap.live_bytes).sum();
    let holes: u64 = arena.holes.iter().map(|class| class.bytes).sum();
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", arena.name);
    let held = |segments: u64| human(segments.saturating_mul(arena.segment_bytes));
    let counts = [arena.segments_in_use, arena.segments_empty];
    let width = counts
        .map(|count| count.to_string().len())
        .into_iter()
        .max()
        .unwrap_or(0);
    let _ = writeln!(
        text,
        "  {:>width$} segments of {} in use: {}, objects {}, holes {} ({})",
        arena.segments_in_use,
        human(arena.segment_bytes),
        held(arena.segments_in_use),
        human(live),
        human(holes),
        percent(holes, live + holes),
    );
    let _ = writeln!(
        text,
        "  {:>width$} empty ones that have not gone back to the host yet: {}",
        arena.segments_empty,
        held(arena.segments_empty)
    );
    live_shares(&mut text, arena);
    hole_sizes(&mut text, arena);
    heaps(&mut text, arena);
    text
}

/// What contexts take, and where reads found theirs.
pub fn contexts(disk: &DiskStats, bytes: bool) -> String {
    let size = |value: u64| if bytes { value.to_string() } else { human(value) };
    let ContextBytes {
        worker,
        shared,
        decompression,
    } = disk.context_bytes;
    let queues = disk.queues_running * worker;
    let algorithms = disk.recompress_algorithms.len();
    let lines = [
        (
            "compression",
            queues,
            format!("{} queues run, {} each", disk.queues_running, size(worker)),
        ),
        (
            "shared",
            shared,
            format!("{algorithms} algorithms for recompression, and all dictionaries"),
        ),
        ("decompression", decompression, "shared by all queues".into()),
        (
            "all",
            queues + shared + decompression,
            "beside what TOTAL counts".into(),
        ),
    ];
    let lines = lines.map(|(what, value, told)| (what, size(value), told));
    let width = lines.iter().map(|(_, value, _)| value.len()).max().unwrap_or(0);
    let mut text = format!("{}\n", disk.name);
    for (what, value, told) in lines {
        let _ = writeln!(text, "  {what:<13} {value:>width$}  {told}");
    }
    let _ = writeln!(
        text,
        "  page reads that took their own decompression context: {}\n  another, for theirs was in use: {}\n  \
         none at first, and waited, which should stay 0: {}",
        disk.contexts_own, disk.contexts_borrowed, disk.contexts_waited
    );
    text
}

fn live_shares(text: &mut String, arena: &Arena) {
    let most = arena.live_shares.iter().copied().max().unwrap_or(0);
    let step = 100 / arena.live_shares.len().max(1);
    let _ = writeln!(text, "\nLIVE SHARE  SEGMENTS");
    for (index, &segments) in arena.live_shares.iter().enumerate() {
        let range = format!("{}-{}%", index * step, (index + 1) * step);
        let _ = writeln!(text, "{}", line(format!("{range:>10} {segments:>9}"), segments, most));
    }
}

fn hole_sizes(text: &mut String, arena: &Arena) {
    if arena.holes.is_empty() {
        return;
    }
    let most = arena.holes.iter().map(|class| class.bytes).max().unwrap_or(0);
    let _ = writeln!(text, "\nHOLES FROM    COUNT  BYTES");
    for class in &arena.holes {
        let columns = format!(
            "{:>10} {:>8} {:>6}",
            human(class.bytes_min),
            class.count,
            human(class.bytes)
        );
        let _ = writeln!(text, "{}", line(columns, class.bytes, most));
    }
}

fn heaps(text: &mut String, arena: &Arena) {
    let mut heaps: Vec<_> = arena.heaps.iter().collect();
    heaps.sort_by_key(|heap| std::cmp::Reverse(heap.hole_bytes));
    if !heaps.is_empty() {
        let _ = writeln!(text, "\n      HEAP SEGMENTS OBJECTS  HOLES SHARE");
    }
    let listed = heaps.iter().take(HEAPS_MAX).map(|heap| {
        let sums = (heap.segments, heap.live_bytes, heap.hole_bytes);
        (heap.heap.to_string(), sums)
    });
    let others = heaps.iter().skip(HEAPS_MAX);
    let rest = others.fold((0, 0, 0), |sums, heap| {
        (
            sums.0 + heap.segments,
            sums.1 + heap.live_bytes,
            sums.2 + heap.hole_bytes,
        )
    });
    let rest = (rest.0 > 0).then(|| (format!("{} more", heaps.len() - HEAPS_MAX), rest));
    for (name, (segments, live, holes)) in listed.chain(rest) {
        let _ = writeln!(
            text,
            "{name:>10} {segments:>8} {:>7} {:>6} {:>5}",
            human(live),
            human(holes),
            percent(holes, live + holes)
        );
    }
    if arena.busy_heaps > 0 {
        let _ = writeln!(
            text,
            "{:>10} were in use at the moment and are left out",
            arena.busy_heaps
        );
    }
}

/// Columns, and a bar for `value`, of which the longest stands for `most`. What is there has a bar, however short.
fn line(columns: String, value: u64, most: u64) -> String {
    let length = match most {
        0 => 0,
        most => (u128::from(value) * u128::from(BAR_MAX)).div_ceil(u128::from(most)) as usize,
    };
    format!("{columns} {}", "#".repeat(length)).trim_end().into()
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        whole => format!("{:.1}%", part as f64 * 100.0 / whole as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Heap, Holes};

    fn heap(heap: u64, segments: u64, live_bytes: u64, hole_bytes: u64) -> Heap {
        Heap {
            heap,
            segments,
            live_bytes,
            hole_bytes,
        }
    }

    #[test]
    fn segments_holes_and_owners_are_to_be_seen() {
        let arena = Arena {
            name: "swap0".into(),
            segment_bytes: 65536,
            segments_in_use: 16,
            segments_empty: 2,
            live_shares: vec![1, 0, 0, 0, 0, 0, 0, 0, 5, 10],
            holes: vec![
                Holes {
                    bytes_min: 8,
                    count: 3,
                    bytes: 40,
                },
                Holes {
                    bytes_min: 32768,
                    count: 2,
                    bytes: 102_400,
                },
            ],
            heaps: vec![heap(0, 10, 640_000, 15_360), heap(3, 6, 306_136, 87_080)],
            busy_heaps: 1,
        };
        assert_eq!(
            super::arena(&arena),
            "swap0
  16 segments of 64K in use: 1M, objects 924K, holes 100K (9.8%)
   2 empty ones that have not gone back to the host yet: 128K

LIVE SHARE  SEGMENTS
     0-10%         1 ####
    10-20%         0
    20-30%         0
    30-40%         0
    40-50%         0
    50-60%         0
    60-70%         0
    70-80%         0
    80-90%         5 ####################
   90-100%        10 ########################################

HOLES FROM    COUNT  BYTES
        8B        3    40B #
       32K        2   100K ########################################

      HEAP SEGMENTS OBJECTS  HOLES SHARE
         3        6    299K    85K 22.1%
         0       10    625K    15K  2.3%
         1 were in use at the moment and are left out
"
        );
    }

    #[test]
    fn the_largest_arena_fits_80_columns() {
        let segments = (64 << 40) / 65536;
        let arena = Arena {
            name: "x".repeat(20),
            segment_bytes: 65536,
            segments_in_use: segments,
            segments_empty: segments,
            live_shares: vec![segments; 10],
            holes: (3..17)
                .map(|power| Holes {
                    bytes_min: 1 << power,
                    count: 99_999_999,
                    bytes: (64 << 40) - 1,
                })
                .collect(),
            heaps: (0..200)
                .map(|number| heap(number, segments / 200, 999 << 30, 999 << 30))
                .collect(),
            busy_heaps: 200,
        };
        let text = super::arena(&arena);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("184 more"), "{text}");
    }

    #[test]
    fn an_empty_arena_has_a_picture_too() {
        let text = super::arena(&Arena {
            live_shares: vec![0; 10],
            segment_bytes: 65536,
            ..Arena::default()
        });
        assert!(
            text.contains("0 segments of 64K in use: 0B, objects 0B, holes 0B (-)"),
            "{text}"
        );
    }
}
