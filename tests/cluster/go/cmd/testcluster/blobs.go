package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// blobStore keeps an image registry's layers in a folder, one file per digest.
// The library's own disk handler reads a whole layer for each question about its
// size, which takes seconds for layers of gigabytes; here a file that lies under
// its digest was checked when it was written.
type blobStore struct{ folder string }

func (s blobStore) path(digest v1.Hash) string {
	return filepath.Join(s.folder, digest.Algorithm+"-"+digest.Hex)
}

// Stat returns the size of a layer in bytes.
func (s blobStore) Stat(_ context.Context, _ string, digest v1.Hash) (int64, error) {
	info, err := os.Stat(s.path(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, registry.ErrNotFound
	}
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Get opens a layer.
func (s blobStore) Get(_ context.Context, _ string, digest v1.Hash) (io.ReadCloser, error) {
	file, err := os.Open(s.path(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, registry.ErrNotFound
	}
	return file, err
}

// Put stores a layer that came in one request; the reader fails when the content
// is not that of the digest.
func (s blobStore) Put(_ context.Context, _ string, digest v1.Hash, content io.ReadCloser) error {
	defer content.Close()
	file, err := os.CreateTemp(s.folder, "upload-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // nothing is left of it after the rename
	if _, err = io.Copy(file, content); err != nil {
		file.Close()
		return err
	}
	return s.publish(file, digest)
}

// publish closes a file in the store's folder and gives it the name of its digest.
func (s blobStore) publish(file *os.File, digest v1.Hash) error {
	if err := file.Close(); err != nil {
		return err
	}
	return os.Rename(file.Name(), s.path(digest))
}
