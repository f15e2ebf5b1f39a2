//! Files that are written and read again, and files that are damaged.

use bytes::Bytes;
use proptest::prelude::*;

use crate::{Error, LayoutDiffers, Planner, Reader, Unordered, Writer};

const NAMES: [&str; 3] = ["auth", "key", "meta"];

/// The keys and values of the buckets.
type Content = [Vec<(Vec<u8>, Vec<u8>)>; 3];

fn write(content: &Content) -> Vec<u8> {
    let mut planner = Planner::default();
    for (name, pairs) in NAMES.into_iter().zip(content) {
        planner.bucket(name).unwrap();
        for (key, value) in pairs {
            planner.add(key.clone().into(), value.len()).unwrap();
        }
    }
    let layout = planner.finish();
    let (mut writer, mut file) = (Writer::new(layout), Vec::new());
    for (name, pairs) in NAMES.into_iter().zip(content) {
        writer.bucket(name).unwrap();
        for (key, value) in pairs {
            writer.add(key.clone().into(), value.clone().into()).unwrap();
            file.extend(writer.take());
        }
    }
    file.extend(writer.finish().unwrap());
    assert_eq!(file.len() as u64, layout.bytes());
    file
}

/// A bucket that was read: its name, and its keys and values.
type Found = (Bytes, Vec<(Bytes, Bytes)>);

/// Reads everything twice.
fn read(file: &[u8]) -> Result<Vec<Found>, Error> {
    let reader = Reader::open(file, file.len() as u64)?;
    let mut visited = 0;
    reader.visit(|_, _, _| {
        visited += 1;
        Ok(())
    })?;
    let mut found = Vec::new();
    for (name, bucket) in reader.buckets()? {
        let (mut cursor, mut pairs) = (reader.cursor(&bucket), Vec::new());
        while let Some(pair) = cursor.next(&reader)? {
            pairs.push(pair);
        }
        found.push((name, pairs));
    }
    assert_eq!(visited, found.iter().map(|(_, pairs)| pairs.len()).sum::<usize>());
    Ok(found)
}

fn numbered(count: usize, key_bytes: usize, value_bytes: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let pair = |number: usize| (format!("{number:0key_bytes$}").into_bytes(), vec![b'v'; value_bytes]);
    (0..count).map(pair).collect()
}

#[test]
fn what_was_written_is_read() {
    let contents: &[Content] = &[
        [vec![], vec![], vec![]],
        [vec![], numbered(1, 17, 0), vec![]],
        [numbered(3, 9, 8), numbered(100, 17, 10), numbered(2, 20, 17)],
        [vec![], numbered(20_000, 17, 100), vec![]],
        // Values of several pages, and keys of which a branch has few.
        [vec![], numbered(50, 17, 9_000), numbered(40, 3_000, 1)],
        [vec![], numbered(60, 17, 4_080 - 16 - 17), numbered(9, 30_000, 4)],
    ];
    for content in contents {
        let file = write(content);
        let read = read(&file).unwrap();
        assert_eq!(read.len(), NAMES.len());
        for ((name, pairs), (expected, content)) in read.iter().zip(NAMES.into_iter().zip(content)) {
            assert_eq!(name, expected.as_bytes());
            let pairs: Vec<(Vec<u8>, Vec<u8>)> = pairs.iter().map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
            assert!(pairs == *content, "{name:?}: {} of {} pairs", pairs.len(), content.len());
        }
    }
}

#[test]
fn a_writer_refuses_what_no_reader_would_accept() {
    let mut planner = Planner::default();
    planner.bucket("b").unwrap();
    planner.add(Bytes::from_static(b"k"), 1).unwrap();
    assert_eq!(planner.add(Bytes::from_static(b"k"), 1), Err(Unordered));
    assert_eq!(planner.bucket("a"), Err(Unordered));

    let mut planner = Planner::default();
    planner.bucket("b").unwrap();
    planner.add(Bytes::from_static(b"k"), 1).unwrap();
    let mut writer = Writer::new(planner.finish());
    writer.bucket("b").unwrap();
    writer.add(Bytes::from_static(b"k"), Bytes::from(vec![0; 5_000])).unwrap();
    assert_eq!(writer.finish(), Err(LayoutDiffers));
}

#[test]
fn the_newest_valid_meta_counts() {
    let file = write(&[vec![], numbered(300, 17, 10), vec![]]);
    for (damage, is_read) in [(&[0][..], true), (&[1], true), (&[0, 1], false)] {
        let mut file = file.clone();
        for page in damage {
            file[page * 4_096 + 30] ^= 1;
        }
        assert_eq!(read(&file).is_ok(), is_read, "{damage:?}");
    }
}

#[test]
fn a_file_that_is_cut_off_is_refused() {
    let file = write(&[vec![], numbered(300, 17, 10), vec![]]);
    for len in 0..file.len() {
        assert!(read(&file[..len]).is_err(), "{len}");
    }
}

proptest! {
    /// Whatever a file contains, it is read or refused; what is read is in order.
    #[test]
    fn damage_is_harmless(places in proptest::collection::vec((0_usize..9 * 4_096, any::<u8>()), 1..8)) {
        let mut file = write(&[numbered(3, 9, 8), numbered(400, 17, 40), numbered(2, 20, 17)]);
        for (at, byte) in places {
            let at = at % file.len();
            file[at] = byte;
        }
        if let Ok(found) = read(&file) {
            for (_, pairs) in found {
                prop_assert!(pairs.is_sorted_by(|(a, _), (b, _)| a < b));
            }
        }
    }

    /// In the list of elements of a page nearly every change matters.
    #[test]
    fn damage_of_a_list_of_elements_is_harmless(page in 2_usize..9, at in 0_usize..300, byte: u8) {
        let mut file = write(&[numbered(3, 9, 8), numbered(400, 17, 40), numbered(2, 20, 17)]);
        let at = (page * 4_096 + at) % file.len();
        file[at] = byte;
        let _ = read(&file);
    }
}
