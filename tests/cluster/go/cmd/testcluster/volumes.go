package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	core "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// volumeKeeper offers a node's static local PersistentVolumes, each a folder of the
// node, and offers a released one again once its content is gone.
type volumeKeeper struct {
	client                      kubernetes.Interface
	node, folder, class, prefix string
	capacity                    apiresource.Quantity
}

func (k *volumeKeeper) volume(index int) *core.PersistentVolume {
	name := fmt.Sprintf("%s-%d", k.prefix, index)
	return &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: name},
		Spec: core.PersistentVolumeSpec{
			Capacity: core.ResourceList{core.ResourceStorage: k.capacity},
			AccessModes: []core.PersistentVolumeAccessMode{
				core.ReadWriteOnce, core.ReadOnlyMany, core.ReadWriteMany,
			},
			PersistentVolumeReclaimPolicy: core.PersistentVolumeReclaimRetain,
			StorageClassName:              k.class,
			PersistentVolumeSource: core.PersistentVolumeSource{
				Local: &core.LocalVolumeSource{Path: filepath.Join(k.folder, name)},
			},
			NodeAffinity: &core.VolumeNodeAffinity{Required: &core.NodeSelector{
				NodeSelectorTerms: []core.NodeSelectorTerm{{MatchExpressions: []core.NodeSelectorRequirement{
					{Key: core.LabelHostname, Operator: core.NodeSelectorOpIn, Values: []string{k.node}},
				}}},
			}},
		},
	}
}

// empty makes a volume's folder, or removes what is in it. Any user may write to it.
func empty(folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	return os.Chmod(folder, 0o777) // MkdirAll's mode is subject to the umask
}

// keep makes one volume, or offers it again if its claim is gone.
func (k *volumeKeeper) keep(ctx context.Context, index int, known map[string]*core.PersistentVolume) error {
	wanted := k.volume(index)
	volume := known[wanted.Name]
	switch {
	case volume == nil:
		if err := empty(wanted.Spec.Local.Path); err != nil {
			return err
		}
		_, err := k.client.CoreV1().PersistentVolumes().Create(ctx, wanted, meta.CreateOptions{})
		return err
	case volume.Status.Phase == core.VolumeReleased:
		if err := empty(wanted.Spec.Local.Path); err != nil {
			return err
		}
		volume.Spec.ClaimRef = nil
		_, err := k.client.CoreV1().PersistentVolumes().Update(ctx, volume, meta.UpdateOptions{})
		return err
	}
	return nil
}

func (k *volumeKeeper) keepAll(ctx context.Context, count int) error {
	list, err := k.client.CoreV1().PersistentVolumes().List(ctx, meta.ListOptions{})
	if err != nil {
		return err
	}
	known := map[string]*core.PersistentVolume{}
	for i := range list.Items {
		known[list.Items[i].Name] = &list.Items[i]
	}
	for i := range count {
		if err := k.keep(ctx, i, known); err != nil {
			return err
		}
	}
	return nil
}

func volumeKeeperMain() {
	flags := flag.NewFlagSet("volume-keeper", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "kubeconfig")
	node := flags.String("node-name", "", "name of the node that has the folders")
	folder := flags.String("folder", "", "folder of the volumes")
	class := flags.String("storage-class", "local", "storage class of the volumes")
	count := flags.Int("count", 8, "how many volumes there are")
	capacity := flags.String("capacity", "20Gi", "capacity that each volume claims to have")
	exitOn("volume-keeper", flags.Parse(os.Args[1:]))
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	exitOn("volume-keeper", err)
	client, err := kubernetes.NewForConfig(config)
	exitOn("volume-keeper", err)
	keeper := &volumeKeeper{
		client: client, node: *node, folder: *folder, class: *class, prefix: *node,
		capacity: apiresource.MustParse(*capacity),
	}
	for ; ; time.Sleep(time.Second) {
		if err := keeper.keepAll(context.Background(), *count); err != nil {
			log.Printf("volumes of %s: %v", *node, err)
		}
	}
}
