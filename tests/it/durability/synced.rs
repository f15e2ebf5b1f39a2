//! Files are on the disk before a command ends that wrote them, and before the rows that they replace are deleted.

use std::path::{Path, PathBuf};

use orlop_wire::proto::client::etcdserverpb::CompactionRequest;
use tempfile::TempDir;

use crate::{
    support::{Backend, Client, Place, Server, orlop, run},
    torture::preload::Preload,
};

fn text(path: &Path) -> &str {
    path.to_str().expect("the path is text")
}

/// Runs a command, which must succeed. Returns what it synced, in order, with the sizes.
fn syncs_of(arguments: &[&str]) -> Vec<(PathBuf, u64)> {
    let preload = Preload::build();
    let output = run(orlop(arguments).envs(preload.listing_environment()));
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    preload.syncs()
}

/// The file is synced when it is complete and still has its temporary name, and its folder after the file has its final one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saved_snapshots_and_restored_databases_are_synced_with_their_folders() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    // So that the size of an incomplete file differs.
    Client::connect(server.endpoint()).await.put("a", vec![b'v'; 100_000]).await;
    let home = TempDir::new().expect("a folder");
    let home = home.path().canonicalize().expect("the folder exists");
    let (file, data) = (home.join("saved.db"), home.join("data"));
    let save = ["snapshot", "save", text(&file), "--endpoints", server.endpoint()];
    let restore = ["snapshot", "restore", text(&file), "--data-dir", text(&data)];
    for (arguments, folder, file) in [(&save, &home, &file), (&restore, &data, &data.join("orlop.db"))] {
        let syncs = syncs_of(arguments);
        let [.., (synced_file, bytes), (synced_folder, _)] = &syncs[..] else { panic!("{arguments:?}: {syncs:?}") };
        assert_eq!((synced_file.parent(), synced_folder), (Some(&**folder), folder), "{arguments:?}: {syncs:?}");
        let complete = file.metadata().expect("the file exists").len();
        assert!(synced_file != file && *bytes == complete, "{arguments:?}: {complete} bytes, {syncs:?}");
    }
}

/// A power cut would otherwise leave neither a row nor its copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_archived_rows_are_synced_before_the_rows_are_deleted() {
    let preload = Preload::build();
    let place = Place { environment: preload.listing_environment(), ..Place::default() };
    let server = Server::orlop_at(None, &["--history-retention", "1h"], place).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("a", "v").await;
    let revision = client.put("a", "v").await;
    let before = preload.syncs().len();
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    let syncs = preload.syncs();
    let names = syncs[before..].iter().filter_map(|(path, _)| path.file_name()?.to_str());
    let names: Vec<&str> = names.skip_while(|name| *name != "orlop.db-wal").collect();
    // The compact revision, the copy, the deletion.
    assert!(names.starts_with(&["orlop.db-wal", "orlop.db-archive-wal", "orlop.db-wal"]), "{names:?}");
}
